"""A step that nobody waits for any more is broken off, and leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from engine.commands import AddRequests, FinishRequests
from engine.core.core import EngineCore
from engine.errors import StepAbandoned
from engine.frontend.async_llm import AsyncLLM
from engine.messages import EngineCoreRequest, FinishReason
from engine.plan import ModelRunnerOutput, SchedulerOutput
from engine.transport.channel import RequestChannel
from engine.transport.client import ThreadClient
from tests.engine.checked_executor import CheckedExecutor
from tests.engine.helpers import assert_nothing_left, make_core, make_request, run_to_end, simulated, tokens_of, until
from tests.engine.serving import MAX_MODEL_LEN, TOKENIZER, VOCAB_SIZE, collect, expected_tokens

pytestmark = pytest.mark.anyio


@dataclass
class LayeredDevice:
    """Between the layers of a step it asks whether the step is still wanted. A chosen step takes for ever otherwise,
    unless the test ends it."""

    executor: CheckedExecutor
    is_long: Callable[[SchedulerOutput], bool]
    is_in_long_step: bool = False
    num_abandoned: int = 0
    go_on: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.num_blocks = self.executor.num_blocks
        self.block_size = self.executor.block_size
        self.vocab_size = self.executor.vocab_size

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> LayeredStep:
        return LayeredStep(self, plan, abandoned or (lambda: False))

    def run_layers(self, plan: SchedulerOutput, abandoned: Callable[[], bool]) -> None:
        self.is_in_long_step = not self.go_on.is_set() and self.is_long(plan)
        while True:
            if abandoned():
                self.num_abandoned += 1
                raise StepAbandoned("nobody wants it")
            if not self.is_in_long_step or self.go_on.wait(0.001):
                break
        self.is_in_long_step = False

    def shutdown(self) -> None:
        self.executor.shutdown()


@dataclass
class LayeredStep:
    """Its diffs are applied before the layers are run, as in the model runner."""

    device: LayeredDevice
    plan: SchedulerOutput
    abandoned: Callable[[], bool]

    def result(self) -> ModelRunnerOutput:
        self.device.executor.before_step = lambda plan: self.device.run_layers(plan, self.abandoned)
        return self.device.executor.submit(self.plan).result()


@dataclass
class Serving:
    llm: AsyncLLM
    core: EngineCore
    device: LayeredDevice

    async def in_long_step(self) -> None:
        await until(lambda: self.device.is_in_long_step)

    async def assert_nothing_left(self) -> None:
        await until(lambda: not self.core.has_work and self.core.num_steps == self.core.scheduler._step)
        self.core.executor = self.device.executor  # where the helper looks for rows
        assert_nothing_left(self.core)
        assert self.llm.num_open_choices == 0


@asynccontextmanager
async def serving(is_long: Callable[[SchedulerOutput], bool], **options: Any) -> AsyncIterator[Serving]:
    cores: list[EngineCore] = []
    devices: list[LayeredDevice] = []

    def make() -> EngineCore:
        core = make_core(vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, **options)
        devices.append(LayeredDevice(simulated(core), is_long))
        cores.append(EngineCore(core.config, devices[0]))
        return cores[0]

    llm = AsyncLLM(ThreadClient(make), TOKENIZER, seed=0)
    async with llm.running():
        try:
            await llm.wait_ready()
            yield Serving(llm, cores[0], devices[0])
        finally:
            devices[0].go_on.set()


async def tokens_from(llm: AsyncLLM, request: EngineCoreRequest) -> list[int]:
    async with llm.stream(request) as stream:
        return [token_id for output in await collect(stream) for token_id in output.token_ids]


class Client:
    """A client that reads until it leaves."""

    def __init__(self, llm: AsyncLLM, request: EngineCoreRequest) -> None:
        self.llm = llm
        self.request = request
        self.scope = anyio.CancelScope()
        self.tokens: list[int] | None = None

    async def run(self) -> None:
        with self.scope:
            self.tokens = await tokens_from(self.llm, self.request)


@pytest.mark.parametrize("long_step", [1, 2, 6])
async def test_a_step_whose_only_client_has_gone_ends_early_and_the_next_request_is_right(long_step: int) -> None:
    """In the first chunk of a prefill, in a later one, and while decoding."""
    async with serving(lambda plan: plan.step == long_step) as engine, anyio.create_task_group() as tasks:
        gone = Client(engine.llm, make_request(range(100), max_tokens=20))
        tasks.start_soon(gone.run)
        await engine.in_long_step()
        gone.scope.cancel()
        await until(lambda: engine.device.num_abandoned == 1)  # though nothing else would ever end the step
        following = make_request([*range(90), 7, 7], max_tokens=10)
        assert await tokens_from(engine.llm, following) == expected_tokens(following)
        await engine.assert_nothing_left()


async def test_all_choices_of_a_request_go_at_once() -> None:
    async with serving(lambda plan: plan.step == 3) as engine, anyio.create_task_group() as tasks:
        gone = Client(engine.llm, make_request(range(20), max_tokens=50, n=4))
        tasks.start_soon(gone.run)
        await engine.in_long_step()
        gone.scope.cancel()
        await until(lambda: engine.device.num_abandoned == 1)
        await engine.assert_nothing_left()


async def test_a_step_that_one_of_two_clients_still_waits_for_goes_on() -> None:
    async with serving(lambda plan: len(plan.request_ids) == 2) as engine, anyio.create_task_group() as tasks:
        gone = Client(engine.llm, make_request(range(20), max_tokens=100))
        stays = Client(engine.llm, make_request(range(50, 70), max_tokens=100))
        tasks.start_soon(gone.run)
        tasks.start_soon(stays.run)
        await engine.in_long_step()
        gone.scope.cancel()
        for _ in range(10):
            await anyio.sleep(0.002)
        assert engine.device.is_in_long_step
        engine.device.go_on.set()
        await until(lambda: stays.tokens is not None)
        assert engine.device.num_abandoned == 0
        assert stays.tokens == expected_tokens(stays.request)
        await engine.assert_nothing_left()


async def test_when_the_second_of_two_leaves_too_the_step_ends() -> None:
    async with serving(lambda plan: len(plan.request_ids) == 2) as engine, anyio.create_task_group() as tasks:
        clients = [Client(engine.llm, make_request([number] * 20, max_tokens=100)) for number in range(2)]
        for client in clients:
            tasks.start_soon(client.run)
        await engine.in_long_step()
        for client in clients:
            assert engine.device.num_abandoned == 0
            client.scope.cancel()
        await until(lambda: engine.device.num_abandoned == 1)
        await engine.assert_nothing_left()


async def test_who_waits_behind_an_abandoned_step_is_served() -> None:
    async with serving(lambda plan: plan.step == 2, max_num_seqs=1) as engine, anyio.create_task_group() as tasks:
        gone = Client(engine.llm, make_request(range(100), max_tokens=20))
        waits = Client(engine.llm, make_request(range(100), max_tokens=20))
        tasks.start_soon(gone.run)
        await engine.in_long_step()
        tasks.start_soon(waits.run)
        await until(lambda: engine.llm.num_open_choices == 2)
        gone.scope.cancel()
        await until(lambda: waits.tokens is not None)
        assert waits.tokens == expected_tokens(waits.request)
        await engine.assert_nothing_left()


async def test_a_client_that_leaves_between_two_steps_does_not_abandon_the_next() -> None:
    channel = RequestChannel(lambda _: None)
    channel.put(AddRequests.of([make_request([1], "a")]))
    assert not channel.are_leaving(["a"])
    assert channel.are_leaving.news.value == 0
    channel.put(FinishRequests(["a", "b"], FinishReason.ABORT))
    assert channel.are_leaving(["a"])
    assert channel.are_leaving(["b", "a"])
    assert not channel.are_leaving(["a", "c"])
    assert not channel.are_leaving([])  # a step that only lets go of rows has to be made
    assert channel.are_leaving.news.value == 1
    channel.receive(wait=False)
    assert not channel.are_leaving(["a"])
    assert channel.are_leaving.news.value == 0


def test_an_abandoned_step_that_is_wanted_after_all_is_made_again() -> None:
    """`abandoned` is only ever true for requests whose end has been sent, but nothing is wrong if they go on."""
    core = make_core(vocab_size=VOCAB_SIZE, max_num_batched_tokens=16)
    num_abandoned = 0

    def abandon(plan: SchedulerOutput) -> None:
        nonlocal num_abandoned
        if plan.request_ids and plan.step % 3:
            num_abandoned += 1
            raise StepAbandoned("so it seemed")

    simulated(core).before_step = abandon
    requests = [make_request([number, *range(20)], f"r{number}", max_tokens=8) for number in range(3)]
    for request in requests:
        core.add(request)
    outputs = run_to_end(core)
    for request in requests:
        assert tokens_of(outputs[request.request_id]) == expected_tokens(request)
    assert num_abandoned > 0
    assert_nothing_left(core)
