"""What a request costs besides its answer: how often something is written, and what is left for the collector."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest
from hypercorn.asyncio import serve
from starlette.types import Receive, Scope, Send

from app.config.settings import Settings
from app.http.hypercorn import patch_hypercorn
from app.http.scope import Bodies, RequestScope
from app.serving.process import hypercorn_config
from protocol.errors import ApiError
from tests.support.harness import TIMEOUT

pytestmark = pytest.mark.anyio

REQUEST = b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\n\r\n{}"
END_OF_CHUNKS = b"0\r\n\r\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def no_frame(error: ApiError) -> bytes:
    return b""


async def whole(request: RequestScope) -> None:
    await request.send_json(200, b"{}")


async def streamed(request: RequestScope) -> None:
    await request.start_stream("text/plain", error_frame=no_frame, keep_alive=(99.0, b""), more_follows=True)
    await request.send_chunk(b"first")
    await request.send_chunk(b"second")
    await request.end_stream(b"last")


async def until_the_server_rests() -> None:
    """Its task is gone, and its connection waits. Turns of the loop count, however long a busy machine makes them."""
    for _ in range(20):
        await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(
    handler: Callable[[RequestScope], Awaitable[None]],
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server that answers every request by `handler`."""
    patch_hypercorn()
    settings = Settings()
    ended = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await RequestScope(scope, receive, send, settings, Bodies(None)).run(handler)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        config = hypercorn_config(settings, listener)
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(partial(serve, app, config, shutdown_trigger=ended.wait))  # type: ignore[arg-type]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                with anyio.fail_after(TIMEOUT):
                    yield reader, writer
            finally:
                writer.close()
                ended.set()


@pytest.mark.parametrize(
    ("handler", "ends_with", "writes"),
    [
        pytest.param(whole, [b"\r\n\r\n{}"], 1, id="whole"),
        pytest.param(streamed, [b"first\r\n", b"second\r\n", b"last\r\n" + END_OF_CHUNKS], 3, id="streamed"),
    ],
)
async def test_what_is_said_at_once_is_written_at_once(
    handler: Callable[[RequestScope], Awaitable[None]],
    ends_with: list[bytes],
    writes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[bytes] = []
    write = asyncio.StreamWriter.write

    def note(self: asyncio.StreamWriter, data: bytes) -> None:
        if data != REQUEST:
            written.append(data)
        write(self, data)

    monkeypatch.setattr(asyncio.StreamWriter, "write", note)
    async with serving(handler) as (reader, writer):
        for _ in range(2):  # on one connection
            written.clear()
            writer.write(REQUEST)
            await reader.readuntil(ends_with[-1])
            assert len(written) == writes
            assert written[0].startswith(b"HTTP/1.1 200 ")
            assert all(piece.endswith(end) for piece, end in zip(written, ends_with, strict=True))


@pytest.mark.parametrize(("handler", "end"), [(whole, b"\r\n\r\n{}"), (streamed, END_OF_CHUNKS)])
async def test_a_request_that_has_ended_leaves_nothing_to_the_collector(
    handler: Callable[[RequestScope], Awaitable[None]], end: bytes
) -> None:
    async with serving(handler) as (reader, writer):

        async def ask(times: int) -> None:
            for _ in range(times):
                writer.write(REQUEST)
                await reader.readuntil(end)
            await until_the_server_rests()

        await ask(2)
        gc.collect()
        gc.disable()
        try:
            await ask(20)
            assert gc.collect() < 20
        finally:
            gc.enable()


async def test_a_client_that_leaves_ends_its_request_though_no_task_waits_for_it() -> None:
    left: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    tasks: list[int] = []
    second = asyncio.Event()

    async def handler(request: RequestScope) -> None:
        tasks.append(len(asyncio.all_tasks()))
        if len(tasks) == 1:
            await whole(request)
            return
        second.set()
        try:
            await anyio.sleep_forever()
        finally:
            left.set_result(request.client_gone)

    async with serving(handler) as (reader, writer):
        writer.write(REQUEST)
        await reader.readuntil(b"{}")
        await until_the_server_rests()
        between = len(asyncio.all_tasks())
        writer.write(REQUEST)
        await second.wait()
        assert tasks[1] == between + 1
        writer.close()
        assert await left
