"""An engine on another machine: only its front end can talk to it and only it to its front end, and each sees the other
leave."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import zmq

from engine.commands import EngineDied
from engine.curve import Keys
from engine.errors import EngineDead
from engine.frontend.async_llm import AsyncLLM
from engine.messages import EngineCoreOutputs, EngineReady, FinishReason
from engine.transport.data_parallel import DataParallelClient
from engine.transport.replica import NOTHING_DONE
from engine.transport.wire import Ends, encoder
from tests.engine.helpers import make_request, until
from tests.engine.processes import Launched, is_running, remote_client, serving
from tests.engine.serving import TOKENIZER, collect, expected_tokens

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """What all clients promise is asked of this one on uvloop."""
    return "trio", {}


class Silent(Launched):
    """Of whose end nobody tells but the connection."""

    async def wait_ended(self) -> str:
        await anyio.sleep_forever()
        raise AssertionError


class Launches:
    """Remembers what it has launched."""

    def __init__(self, kind: type[Launched] = Silent) -> None:
        self.kind = kind
        self.all: list[Launched] = []

    def __call__(self, ends: Ends) -> Launched:
        self.all.append(self.kind(ends))
        return self.all[-1]


async def test_a_killed_engine_is_known_by_its_connection() -> None:
    launches = Launches()
    async with serving(remote_client(launches, step_seconds=0.01)) as engine:
        with pytest.raises(EngineDead) as dead:  # noqa: PT012
            async with engine.llm.stream(make_request(range(9), max_tokens=100)) as stream:
                await anext(stream)
                os.kill(launches.all[0].process.pid, signal.SIGKILL)
                with anyio.fail_after(30):
                    await collect(stream)
        assert str(dead.value.__cause__) == "the connection to the engine is lost"
        assert not engine.llm.is_available


async def test_an_engine_that_ends_before_it_connects_is_dead_with_what_its_machine_says() -> None:
    class Short(Launched):
        def __init__(self, ends: Ends) -> None:
            self.process = subprocess.Popen(["sh", "-c", "exit 7"])

    llm = AsyncLLM(remote_client(Short), TOKENIZER)
    async with llm.running():
        with pytest.raises(EngineDead, match="has ended with 7"):
            await llm.wait_ready()


FRONT_END = """
import anyio
from tests.engine.processes import Launched, remote_client

def launch(ends):
    launched = Launched(ends)
    print(launched.process.pid, flush=True)
    return launched

async def main():
    async with remote_client(launch).running(lambda events: print("ready", flush=True)):
        await anyio.sleep_forever()

anyio.run(main)
"""


def test_an_engine_does_not_outlive_its_connection() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", FRONT_END], stdout=subprocess.PIPE, env=environment) as front_end:
        assert front_end.stdout is not None
        engine = int(front_end.stdout.readline())
        assert front_end.stdout.readline() == b"ready\n"
        assert is_running(engine)
        front_end.kill()
        front_end.wait()
        while is_running(engine):
            time.sleep(0.005)


async def test_strangers_are_not_heard_and_disturb_nobody() -> None:
    launches = Launches()
    async with serving(remote_client(launches, step_seconds=0.01)) as engine:
        ends = launches.all[0].ends
        assert ends.keys is not None
        request = make_request(range(9), max_tokens=100)
        died = encoder().encode(EngineDied(EngineDead("so says a stranger")))
        own_public, own_secret = zmq.curve_keypair()
        with ExitStack() as stack:
            context = stack.enter_context(zmq.Context())

            def talk(keys: Keys | None) -> None:
                for kind, address, message in ((zmq.PUSH, ends.up, died), (zmq.DEALER, ends.down, b"")):
                    stranger = stack.enter_context(context.socket(kind))
                    stranger.linger = 0
                    if keys is not None:
                        stranger.curve_serverkey = keys.server_public
                        stranger.curve_publickey, stranger.curve_secretkey = keys.public, keys.secret
                    stranger.connect(address)
                    with suppress(zmq.Again):  # once it has been refused
                        for _ in range(100):
                            stranger.send(message, zmq.NOBLOCK)

            async with engine.llm.stream(request) as stream:
                first = await anext(stream)
                talk(None)
                talk(Keys(ends.keys.server_public, own_public, own_secret))  # the right door, another's key
                talk(Keys(own_public, ends.keys.public, ends.keys.secret))  # the other way round
                for address in (ends.down, ends.up):
                    host, _, port = address.removeprefix("tcp://").rpartition(":")
                    for number in range(100):
                        raw = stack.enter_context(socket.create_connection((host, int(port))))
                        raw.sendall(os.urandom(64) if number % 2 else b"\xff" + bytes(8) + b"\x7f\x03\x00")
                outputs = [first, *await collect(stream)]
            assert [token for output in outputs for token in output.token_ids] == expected_tokens(request)
            assert outputs[-1].finish_reason is FinishReason.LENGTH
            other = make_request(range(20, 30), max_tokens=20)
            assert await engine.read(other) == expected_tokens(other)
        await engine.assert_nothing_left()


NO_BLOCKS = encoder().encode(EngineReady(vocab_size=9, num_blocks=9, block_size=0, max_model_len=9))


class Double(Silent):
    """Somebody else has its keys, too."""

    def __init__(self, ends: Ends) -> None:
        super().__init__(ends)
        self.context: zmq.Context[Any] = zmq.Context()

    def say(self, said: bytes) -> None:
        keys = self.ends.keys
        assert keys is not None
        up = self.context.socket(zmq.PUSH)
        up.curve_serverkey, up.curve_publickey, up.curve_secretkey = keys.server_public, keys.public, keys.secret
        up.connect(self.ends.up)
        up.send(said)

    def kill(self) -> None:
        super().kill()
        self.context.destroy(linger=0)


async def test_one_of_several_that_makes_no_sense_starts_again_and_the_others_go_on() -> None:
    launches = Launches(Double)
    parallel = DataParallelClient(lambda index: remote_client(launches), 2, 8)
    async with serving(parallel) as both:
        stats = msgspec.structs.replace(NOTHING_DONE, step_costs=b"{}")
        [double, _] = launches.all
        assert isinstance(double, Double)
        double.say(encoder().encode(EngineCoreOutputs(outputs=[], stats=stats, timestamp=0.0)))
        await until(lambda: len(launches.all) == 3)
        assert not is_running(double.process.pid)
        request = make_request(range(9), max_tokens=9)
        assert await both.read(request) == expected_tokens(request)
        await both.assert_nothing_left()


@pytest.mark.parametrize(
    "said", [b"\xc1", msgspec.msgpack.encode(["EngineReady", "no number"]), b"\x91" * 100_000, NO_BLOCKS]
)
async def test_what_is_no_event_ends_its_engine_and_not_the_front_end(said: bytes) -> None:
    class Babbling(Double):
        def __init__(self, ends: Ends) -> None:
            super().__init__(ends)
            self.say(said)

    launches = Launches(Babbling)
    llm = AsyncLLM(remote_client(launches), TOKENIZER)
    async with llm.running():
        with pytest.raises(EngineDead, match="says what is no event"):
            await llm.wait_ready()
    assert not is_running(launches.all[0].process.pid)


async def test_deadlines_are_in_the_front_ends_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's machine has been up for longer, or not so long."""
    real = time.monotonic
    for ahead in (-1000.0, 1000.0):
        monkeypatch.setattr("engine.transport.remote.time.monotonic", lambda ahead=ahead: real() + ahead)
        async with serving(remote_client(step_seconds=0.01)) as engine:
            request = make_request(range(9), max_tokens=100)
            request.deadline = real() + ahead + 0.3
            async with engine.llm.stream(request) as stream:
                outputs = await collect(stream)
            assert outputs[-1].finish_reason is not FinishReason.LENGTH
            assert 0 < outputs[-1].num_output_tokens < 100
            await until(lambda: engine.client.is_asleep)
        monkeypatch.undo()


def test_keys_are_not_shown() -> None:
    ends = Ends("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", Keys(b"p" * 40, b"q" * 40, b"s" * 40))
    assert "ssss" not in repr(ends)
    assert "ssss" not in str(ends)
