"""The frames of one step are written together: each client gets its own, whole and in order, and delays no other.

Most tests run with the C++ extension and without it, on asyncio and on uvloop.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import anyio
import pytest
from hypercorn.asyncio import serve
from starlette.types import Receive, Scope, Send

from app.config.settings import Settings
from app.http import hypercorn
from app.http.hypercorn import patch_hypercorn, written_together
from app.http.scope import Bodies, RequestScope
from app.serving.process import hypercorn_config
from protocol.errors import ApiError
from tests.support.harness import TIMEOUT

LOOPS = ["asyncio", pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop")]
on_both_loops = pytest.mark.parametrize("anyio_backend", LOOPS)
# With a compiler, a missing extension is a failure.
needs_extension = pytest.mark.skipif(
    hypercorn._step_writes is None and shutil.which("c++") is None, reason="no C++ compiler builds the extension"
)


@pytest.fixture(params=[pytest.param(True, marks=needs_extension, id="extension"), pytest.param(False, id="python")])
def together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(hypercorn, "_step_writes", None)


class Stream:
    """The server's record of one answer. The path of the request is the name of the stream."""

    def __init__(self, request: RequestScope) -> None:
        self.request = request
        self.over = anyio.Event()
        self.sent = b""
        self.kept = b""  # frames for which the connection had no room
        self.num_direct = 0

    def step(self, frame: bytes) -> None:
        """Write a frame as the listener of a stream does."""
        self.kept += frame
        if self.request.takes_more:
            self.request.send_chunk_now(self.kept)
            self.sent += self.kept
            self.kept = b""
            self.num_direct += 1


class App:
    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}
        self.gone: Counter[str] = Counter()

    async def handle(self, request: RequestScope) -> None:
        async def no_frame(error: ApiError) -> bytes:
            return b""

        stream = Stream(request)
        try:
            await request.start_stream("text/plain", error_frame=no_frame, keep_alive=(99.0, b""))
            self.streams[request.path] = stream
            await stream.over.wait()
            stream.sent += stream.kept
            await request.end_stream(stream.kept)
        finally:
            self.gone[request.path] += 1
            self.streams.pop(request.path, None)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        """Serve until the block ends. Yields the port."""
        patch_hypercorn()
        settings, ended = Settings(), asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                await RequestScope(scope, receive, send, settings, Bodies(None)).run(self.handle)

        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            config = hypercorn_config(settings, listener)
            async with anyio.create_task_group() as task_group:
                task_group.start_soon(partial(serve, app, config, shutdown_trigger=ended.wait))  # type: ignore[arg-type]
                try:
                    with anyio.fail_after(TIMEOUT):
                        yield port
                finally:
                    ended.set()

    async def until(self, *names: str) -> None:
        """Wait until the server answers all these requests."""
        while not self.streams.keys() >= set(names):  # noqa: ASYNC110
            await anyio.sleep(0.001)


class Client:
    """A client with a small receive buffer, which reads only when a test calls `read`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.received = b""

    async def connect(self, port: int) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.setblocking(False)
        await asyncio.get_running_loop().sock_connect(self.socket, ("127.0.0.1", port))
        self.socket.send(f"GET {self.name} HTTP/1.1\r\nhost: here\r\n\r\n".encode())

    def read(self, most: int) -> None:
        with suppress(BlockingIOError):
            self.received += self.socket.recv(most)

    async def read_to_the_end(self) -> bytes:
        """Return the body of the answer."""
        while not self.received.endswith(b"\r\n0\r\n\r\n"):
            before = len(self.received)
            self.read(2**20)
            if len(self.received) == before:
                await anyio.sleep(0.001)
        self.socket.close()
        rest, body = self.received.partition(b"\r\n\r\n")[2], b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            chunk, end, rest = rest[: int(size, 16)], rest[int(size, 16) : int(size, 16) + 2], rest[int(size, 16) + 2 :]
            assert end == b"\r\n"
            body += chunk
        return body


@pytest.mark.anyio
@on_both_loops
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
async def test_every_client_gets_its_own_bytes_however_it_reads_and_whoever_leaves(seed: int, together: None) -> None:
    """Half of the clients read slowly. Some leave, and new clients get their descriptors at once."""
    draw, app, number = random.Random(seed), App(), 0
    clients: dict[str, Client] = {}
    leavers: list[str] = []

    async def join(port: int) -> None:
        nonlocal number
        client = clients[f"/{number}"] = Client(f"/{number}")
        number += 1
        await client.connect(port)

    async with app.serving() as port:
        for _ in range(24):
            await join(port)
        await app.until(*clients)
        for step in range(120):
            frames = {
                name: f"<{name}:{step}:".encode() + bytes([65 + step % 26]) * draw.choice((3, 200, 9000))
                for name in app.streams
            }
            with written_together():
                for name, frame in frames.items():
                    app.streams[name].step(frame)
            for client in clients.values():
                client.read(draw.choice((0, 300, 2**16)) if int(client.name[1:]) % 2 else 2**20)
            if draw.random() < 0.1:  # the loop may notice it only after the next step
                leaver = clients.pop(draw.choice(list(clients)))
                leaver.socket.close()
                leavers.append(leaver.name)
                await join(port)
            if draw.random() < 0.7:
                await asyncio.sleep(0)
        await app.until(*clients)
        while not app.gone.keys() >= set(leavers):  # noqa: ASYNC110
            await anyio.sleep(0.001)
        streams = dict(app.streams)
        assert streams.keys() == clients.keys()
        for stream in streams.values():
            stream.over.set()
        for name, client in clients.items():
            assert await client.read_to_the_end() == streams[name].sent
        assert sum(stream.num_direct for stream in streams.values()) > 500
        assert any(stream.num_direct < 60 for stream in streams.values()), "none lagged"


@pytest.mark.anyio
@on_both_loops
async def test_a_client_that_does_not_read_delays_no_other_and_is_written_to_no_more(together: None) -> None:
    app = App()
    reader, stalled = Client("/reads"), Client("/stalls")
    async with app.serving() as port:
        await reader.connect(port)
        await stalled.connect(port)
        await app.until("/reads", "/stalls")
        for _ in range(200):
            with written_together():
                for stream in app.streams.values():
                    stream.step(bytes(4096))
            reader.read(2**20)
            await asyncio.sleep(0)
            reader.read(2**20)
        reads, stalls = app.streams["/reads"], app.streams["/stalls"]
        assert not reads.kept
        assert len(stalls.kept) > len(stalls.sent), "they wait in the stream, not in the kernel"
        reads.over.set()
        assert await reader.read_to_the_end() == reads.sent
        stalls.over.set()
        assert await stalled.read_to_the_end() == stalls.sent


@pytest.mark.anyio
@on_both_loops
async def test_a_client_that_has_left_is_noticed_by_the_next_step(together: None) -> None:
    app, client = App(), Client("/")
    async with app.serving() as port:
        await client.connect(port)
        await app.until("/")
        client.socket.close()
        for _ in range(3):
            with written_together():
                for stream in app.streams.values():
                    stream.step(b"more")
            await asyncio.sleep(0.01)
        while not app.gone:  # noqa: ASYNC110
            await anyio.sleep(0.001)


@needs_extension
def test_only_the_thread_that_has_begun_a_batch_adds_to_it() -> None:
    writes: Any = hypercorn._step_writes
    here, there = socket.socketpair()
    with here, there:
        assert not writes.add(None, here.fileno(), b"no batch")
        assert writes.begin()
        try:
            seen: list[bool] = []
            other = threading.Thread(
                target=lambda: seen.extend((writes.begin(), writes.add(None, here.fileno(), b"2")))
            )
            other.start()
            other.join()
            assert seen == [False, False]
            assert writes.add("transport", here.fileno(), b"1")
        finally:
            assert writes.end() == []
        assert there.recv(100) == b"1"


@needs_extension
def test_what_sockets_do_not_take_comes_back_with_its_transport() -> None:
    writes: Any = hypercorn._step_writes
    for round_number in range(20):  # many rounds, so that the helper thread is met in every state
        pairs = [socket.socketpair() for _ in range(50)]
        frames = [bytes([number]) * (2**18 if number % 7 == round_number % 7 else 100) for number in range(50)]
        pairs[4][1].close()
        try:
            assert writes.begin()
            for number, frame in enumerate(frames):
                pairs[number][0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
                assert writes.add(number, pairs[number][0].fileno(), frame)
            unsent = dict(writes.end())
            assert unsent.keys() == {4, *range(round_number % 7, 50, 7)}
            for number, (_, there) in enumerate(pairs):
                if number != 4:
                    assert there.recv(2**20) + unsent.get(number, b"") == frames[number]
        finally:
            for pair in pairs:
                for each in pair:
                    each.close()
    with pytest.raises(TypeError):
        writes.add(None, -1, b"")
    with pytest.raises(TypeError):
        writes.add(None, 1, "text")


@needs_extension
def test_a_batch_that_is_full_takes_no_more() -> None:
    writes: Any = hypercorn._step_writes
    here, there = socket.socketpair()
    with here, there:
        assert writes.begin()
        taken = sum(writes.add(None, here.fileno(), b"") for _ in range(5000))
        writes.end()
        assert taken == 4096
