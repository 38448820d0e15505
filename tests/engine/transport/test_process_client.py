"""The engine in a process of its own: each side knows at once when the other has gone, and neither is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from engine.commands import AddRequests, EngineDied, Event, FinishRequests, GetSnapshot, ResetPrefixCache
from engine.errors import ConfigError, EngineDead
from engine.frontend.async_llm import AsyncLLM
from engine.messages import EngineCoreOutputs, EngineReady, FinishReason
from engine.transport.data_parallel import NOTHING_DONE, DataParallelClient
from engine.transport.process_client import EngineProcess, ProcessClient
from engine.transport.wire import NumberChecker, Numberer, decoder, encoder
from tests.engine.helpers import make_request, until
from tests.engine.processes import is_running, process_client, serving
from tests.engine.serving import MAX_MODEL_LEN, TOKENIZER, VOCAB_SIZE, collect, expected_tokens
from tests.engine.transport.test_both_clients import LOOPS
from tests.selection import slow_except

pytestmark = [pytest.mark.anyio, pytest.mark.seconds]


@pytest.fixture(params=slow_except(LOOPS, "uvloop", "trio"))
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return LOOPS[request.param]


@pytest.mark.parametrize(
    ("loading", "words"),
    [("kill", "killed by SIGKILL"), ("exit", "ended with status 7")],
)
async def test_a_process_that_ends_without_a_word_is_told_with_its_status(loading: str, words: str) -> None:
    llm = AsyncLLM(process_client(loading=loading), TOKENIZER)
    async with llm.running():
        with pytest.raises(EngineDead, match=words):
            await llm.wait_ready()


async def test_a_command_that_is_no_engine_is_a_dead_engine() -> None:
    llm = AsyncLLM(ProcessClient(partial(EngineProcess, [sys.executable, "-c", "raise SystemExit(3)"]), {}), TOKENIZER)
    async with llm.running():
        with pytest.raises(EngineDead, match="status 3"):
            await llm.wait_ready()


FEW_DESCRIPTORS = """
import os, resource, sys
from engine.transport.process_client import EngineProcess
refused = 0
for number in range(24):
    process = EngineProcess([sys.executable, "-c", ""])
    limit = len(os.listdir("/proc/self/fd")) + number
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        with process:
            pass
    except OSError:
        refused += 1
print(refused)
"""


def test_a_process_without_descriptors_for_an_engine_raises_and_is_not_aborted() -> None:
    ended = subprocess.run([sys.executable, "-c", FEW_DESCRIPTORS], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) >= 12


BABBLER = """
import pathlib, sys, zmq
from engine.transport.wire import addresses
*_, messages, directory, lifeline = sys.argv
(to_down, to_up), context = addresses(pathlib.Path(directory)), zmq.Context()
down, up = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
down.connect(to_down)
up.connect(to_up)
down.send(b"")
for number, message in enumerate(messages.split(",")):
    while b"ResetPrefixCache" not in down.recv() and number > 0:
        pass
    data, _, times = message.partition("*")
    up.send(number.to_bytes(8, "little") + bytes.fromhex(data) * int(times or 1))
down.recv()
"""
READY = EngineReady(vocab_size=VOCAB_SIZE, num_blocks=64, block_size=4, max_model_len=MAX_MODEL_LEN)
NO_BLOCKS = msgspec.structs.replace(READY, block_size=0)


def babbler(*said: str) -> EngineProcess:
    """Send the first of these messages (hexadecimal, *count) after the setup, the next one after ResetPrefixCache."""
    return EngineProcess([sys.executable, "-c", BABBLER, ",".join(said)])


@pytest.mark.parametrize(
    "said",
    ["c1", msgspec.msgpack.encode(["EngineReady", "no number"]).hex(), "91*100000", encoder().encode(NO_BLOCKS).hex()],
)
async def test_what_is_no_event_ends_its_engine_and_not_the_front_end(said: str) -> None:
    client = ProcessClient(lambda: babbler(said), {})
    llm = AsyncLLM(client, TOKENIZER)
    async with llm.running():
        with pytest.raises(EngineDead, match="has sent an invalid event: (?!message)"):
            await llm.wait_ready()
    assert client.pid is None


@pytest.mark.slow
async def test_one_of_several_that_makes_no_sense_starts_again_and_the_others_go_on() -> None:
    started: list[int] = []
    stats = msgspec.structs.replace(NOTHING_DONE, step_costs=b"{}")
    senseless = EngineCoreOutputs(outputs=[], stats=stats, timestamp=0.0)
    said = [encoder().encode(each).hex() for each in (READY, senseless)]

    def make(index: int) -> ProcessClient:
        client = process_client()
        make_real = client._make_process

        def make_process() -> EngineProcess:
            started.append(index)
            return babbler(*said) if index == 0 and started.count(0) == 1 else make_real()

        client._make_process = make_process
        return client

    parallel = DataParallelClient(make, 2, 8)
    async with serving(parallel) as both:
        both.llm.send(ResetPrefixCache())
        await until(lambda: started.count(0) == 2 and parallel.num_engines == 2)
        assert started.count(1) == 1
        request = make_request(range(9), max_tokens=9)
        assert await both.read(request) == expected_tokens(request)
        await both.assert_nothing_left()


async def test_killed_engine_ends_its_streams_at_once() -> None:
    async with serving("process", step_seconds=0.01) as engine:
        with pytest.raises(EngineDead) as dead:  # noqa: PT012
            async with engine.llm.stream(make_request(range(9), max_tokens=100)) as stream:
                await anext(stream)
                os.kill(engine.client.pid, signal.SIGKILL)
                with anyio.fail_after(30):  # it is not waited for, however slow the machine is
                    await collect(stream)
        assert "killed by SIGKILL" in str(dead.value.__cause__)
        assert not engine.llm.is_available
        with pytest.raises(EngineDead):
            await engine.read(make_request([1]))


async def test_signals_to_the_whole_group_are_for_the_front_end() -> None:
    async with serving("process", step_seconds=0.002) as engine:
        async with engine.llm.stream(make_request(range(9), max_tokens=50)) as stream:
            await anext(stream)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(engine.client.pid, number)
            outputs = await collect(stream)
        assert outputs[-1].finish_reason is FinishReason.LENGTH


async def test_a_signal_that_comes_before_python_has_started_does_no_harm() -> None:
    client = process_client()
    llm = AsyncLLM(client, TOKENIZER)
    async with llm.running():
        assert client.pid is not None
        os.kill(client.pid, signal.SIGTERM)
        os.kill(client.pid, signal.SIGINT)
        assert isinstance(await llm.wait_ready(), EngineReady)


async def test_how_far_loading_is_is_told_in_order() -> None:
    told: list[Any] = []
    llm = AsyncLLM(process_client(lambda *progress: told.append(progress)), TOKENIZER)
    async with llm.running():
        await llm.wait_ready()
        assert told == [("Loading what is simulated", done, 2) for done in (0, 1, 2)]


async def test_leaving_waits_for_the_step_in_progress_but_not_for_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.transport.process_client.END_SECONDS", 0.2)
    hang = tmp_path / "hang"
    async with serving("process", hang_while=str(hang)) as engine:
        pid = engine.client.pid
        hang.touch()
        async with engine.llm.stream(make_request([1, 2], max_tokens=3)):
            await until(lambda: not engine.client.is_asleep)
    assert not is_running(pid)
    assert str(engine.llm.error) == "the engine has been shut down"


async def test_a_stopped_process_is_seen_to_make_no_progress() -> None:
    async with serving("process") as engine:
        await until(lambda: engine.client.is_asleep)
        os.kill(engine.client.pid, signal.SIGSTOP)
        try:
            async with engine.llm.stream(make_request([1, 2], max_tokens=3)):
                await until(lambda: engine.llm.seconds_without_progress() > 0.1)
        finally:
            os.kill(engine.client.pid, signal.SIGCONT)


async def test_a_stopped_process_that_is_not_to_wait_is_killed_by_the_front_end_itself() -> None:
    async with serving(process_client(ends_when_stopped=True)) as engine:
        with pytest.raises(EngineDead) as dead:  # noqa: PT012
            async with engine.llm.stream(make_request([1, 2], max_tokens=100)) as stream:
                os.kill(engine.client.pid, signal.SIGSTOP)
                await collect(stream)
        assert "killed by SIGKILL" in str(dead.value.__cause__)


async def test_what_comes_while_the_loop_is_busy_is_delivered_in_order_and_at_once() -> None:
    received: list[Event] = []
    client = process_client()
    async with client.running(received.extend):
        await until(lambda: received)
        client.send(AddRequests.of([make_request(range(9), max_tokens=30)]))
        busy_until = time.monotonic() + 30
        time.sleep(0.3)  # noqa: ASYNC251 - busy, as a loop may be
        while not client.is_asleep and time.monotonic() < busy_until:
            time.sleep(0.05)  # noqa: ASYNC251
        assert client.is_asleep, "the engine did not wait for it"
        assert len(received) == 1
        await until(lambda: len(received) > 1)
        steps = [message.stats.step for message in received[1:] if isinstance(message, EngineCoreOutputs)]
        assert len(steps) >= 30
        assert steps == list(range(1, len(steps) + 1))


FRONT_END = """
import anyio
from tests.engine.processes import process_client

async def main():
    client = process_client()
    async with client.running(lambda message: print(client.pid, flush=True)):
        await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_an_engine_does_not_outlive_a_front_end_that_is_killed(is_stopped: bool, short_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(short_path), "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen([sys.executable, "-c", FRONT_END], stdout=subprocess.PIPE, env=environment) as front_end:
        assert front_end.stdout is not None
        engine = int(front_end.stdout.readline())
        assert is_running(engine)
        assert list(short_path.iterdir())
        if is_stopped:
            os.kill(engine, signal.SIGSTOP)
        front_end.kill()
        front_end.wait()
        while is_running(engine) or list(short_path.iterdir()):
            time.sleep(0.005)


def test_a_prompt_crosses_once_for_all_its_choices() -> None:
    prompt = make_request(range(5000), "r")
    choices = [msgspec.structs.replace(prompt, request_id=f"r-{index}") for index in range(128)]
    sent = encoder().encode(AddRequests.of(choices))
    assert len(sent) < 2 * len(msgspec.msgpack.encode(prompt))
    arrived = decoder(AddRequests).decode(sent).requests()
    assert arrived == choices
    assert len({id(request.prompt_token_ids) for request in arrived}) == 1


def test_errors_keep_their_class_and_words_across_the_wire() -> None:
    def crossed(error: BaseException) -> BaseException:
        return decoder(Event).decode(encoder().encode(EngineDied(error))).error

    mistake = crossed(ConfigError("dtype", "int3", allowed="it must be auto", hint="dtype=auto works"))
    assert type(mistake) is ConfigError
    assert str(mistake) == "dtype is int3: it must be auto. dtype=auto works"
    assert mistake.__cause__ is None

    try:
        try:
            raise OSError("\udcff has no text")
        except OSError as error:
            raise EngineDead("the device is broken") from error
    except EngineDead as error:
        dead = crossed(error)
    assert (type(dead), str(dead)) == (EngineDead, "the device is broken")
    assert "OSError: \\udcff has no text" in str(dead.__cause__)

    class Unknown(BaseException):
        pass

    assert str(crossed(Unknown("what"))) == "Unknown: what"


async def test_an_engine_that_has_not_been_started_takes_nothing() -> None:
    client = process_client()
    assert (client.is_available, client.is_asleep, client.last_progress, client.pid) == (False, True, 0.0, None)
    client.send(FinishRequests(["nobody"], FinishReason.ABORT))
    with pytest.raises(EngineDead):
        await client.query(GetSnapshot())


@pytest.mark.anyio
@pytest.mark.parametrize("fault", ["lost", "doubled"])
@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_message_that_is_lost_or_doubled_makes_the_engine_dead_and_no_hole(
    fault: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving("process", step_seconds=0.01) as engine:
        link = engine.client._process
        assert isinstance(link, EngineProcess)

        class Faulty:
            """One of the link's sockets, with one fault."""

            def __init__(self, real: Any) -> None:
                self._real = real
                self._pending: list[bytes] = []
                self._is_due = True

            def __getattr__(self, name: str) -> Any:
                return getattr(self._real, name)

            def send_multipart(self, parts: list[bytes], flags: int) -> None:
                for _ in range(self._copies()):
                    self._real.send_multipart(parts, flags)

            def recv(self, flags: int) -> bytes:
                while not self._pending:
                    message = self._real.recv(flags)
                    self._pending = [message] * self._copies()
                return self._pending.pop()

            def _copies(self) -> int:
                is_due, self._is_due = self._is_due, False
                return (0 if fault == "lost" else 2) if is_due else 1

        request = make_request(range(9), max_tokens=60)
        with pytest.raises(EngineDead):  # noqa: PT012
            async with engine.llm.stream(request) as stream:
                tokens = (await anext(stream)).token_ids
                name = "_up" if direction == "up" else "_down"
                monkeypatch.setattr(link, name, Faulty(getattr(link, name)))
                engine.llm.send(ResetPrefixCache())
                engine.llm.send(ResetPrefixCache())
                async for output in stream:
                    tokens += output.token_ids
        assert tokens == expected_tokens(request)[: len(tokens)]


def test_what_has_no_number_or_another_one_is_no_message() -> None:
    numberer, checker = Numberer(), NumberChecker()
    first, second = (
        bytes(numberer.encode(ResetPrefixCache())),
        bytes(numberer.encode(FinishRequests(["a"], FinishReason.ABORT))),
    )
    for wrong in (b"", b"\0", second):
        with pytest.raises(msgspec.DecodeError, match=r"has no number|but message 0 was next"):
            checker.content_of(wrong)
    assert decoder(AddRequests | ResetPrefixCache).decode(checker.content_of(first)) == ResetPrefixCache()
