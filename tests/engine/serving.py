"""An AsyncLLM over a simulated executor, seen from both sides of the thread boundary, for tests."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from engine.core.core import EngineCore
from engine.frontend.async_llm import AsyncLLM
from engine.frontend.request_stream import RequestStream
from engine.messages import EngineCoreRequest, RequestOutput
from engine.plan import SchedulerOutput
from engine.transport.client import ThreadClient
from tests.engine.checked_executor import CheckedExecutor
from tests.engine.helpers import (
    RecordingObserver,
    assert_nothing_left,
    byte_level_tokenizer,
    make_core,
    simulated,
    until,
)
from tests.engine.simulated_tokens import expected_output

TOKENIZER = byte_level_tokenizer()
VOCAB_SIZE = TOKENIZER.get_vocab_size()
MAX_MODEL_LEN = 128


class Gate:
    """Holds the engine's thread inside a chosen step: `before_step` of an executor."""

    def __init__(self) -> None:
        self.step: int | None = None  # the one to hold, from 1
        self.is_holding = False
        self._opened = threading.Event()

    def __call__(self, plan: SchedulerOutput) -> None:
        if plan.step == self.step:
            self.is_holding = True
            self._opened.wait()
            self.is_holding = False

    def open(self) -> None:
        self._opened.set()


@dataclass
class Running:
    """An engine in its thread, seen from both sides."""

    llm: AsyncLLM
    core: EngineCore
    client: ThreadClient
    observer: RecordingObserver
    gate: Gate = field(default_factory=Gate)

    @property
    def executor(self) -> CheckedExecutor:
        return simulated(self.core)

    async def held(self) -> None:
        """Wait until the engine is inside the step that its gate holds."""
        await until(lambda: self.gate.is_holding)

    async def idle(self) -> None:
        """Wait until the engine has nothing to do and has told everything."""
        self.gate.open()
        # In the middle of its last step there is nothing left to do either, so the step must have ended too.
        await until(
            lambda: (
                not self.core.has_work
                and self.core.scheduler._step == self.core.num_steps
                and self.core.num_steps == self.num_steps_told
            )
        )

    async def assert_nothing_left(self) -> None:
        await self.idle()
        assert_nothing_left(self.core)
        assert self.llm.num_open_choices == 0

    @property
    def num_steps_told(self) -> int:
        """Steps whose outputs have been delivered on the event loop."""
        return self.llm.last_stats.step if self.llm.last_stats else 0

    def plans_with(self, request_id: str) -> list[int]:
        """Numbers of the plans (from 1) in which a choice of this request ran."""
        return [
            number
            for number, plan in enumerate(self.executor.plans, 1)
            if any(child_id.startswith(request_id) for child_id in plan.request_ids)
        ]


@asynccontextmanager
async def running(core_class: type[EngineCore] = EngineCore, **options: Any) -> AsyncIterator[Running]:
    gate = Gate()
    cores: list[EngineCore] = []

    def make() -> EngineCore:
        core = make_core(vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, **{"before_step": gate, **options})
        cores.append(core_class(core.config, core.executor))
        return cores[0]

    client, observer = ThreadClient(make), RecordingObserver()
    llm = AsyncLLM(client, TOKENIZER, observer=observer, seed=0)
    async with llm.running():
        try:
            await llm.wait_ready()
            yield Running(llm, cores[0], client, observer, gate)
        finally:
            gate.open()


def expected_tokens(request: EngineCoreRequest) -> list[int]:
    return expected_output(
        request.prompt_token_ids, request.sampling, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN
    ).token_ids


async def collect(stream: RequestStream) -> list[RequestOutput]:
    return [output async for output in stream]


def assert_text_of(text: str, token_ids: list[int], tokenizer: Tokenizer = TOKENIZER) -> None:
    """All of the tokens' text, but for a character that was not finished."""
    whole = tokenizer.decode(token_ids)
    assert whole.startswith(text)
    assert set(whole[len(text) :]) <= {"\ufffd"}


async def read_one(engine: Running, request: EngineCoreRequest) -> None:
    async with engine.llm.stream(request) as stream:
        await collect(stream)
