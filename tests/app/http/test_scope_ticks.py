"""What a request does every so often ends with the request: later, its companions would have nowhere to run."""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from typing import Any

import anyio
import pytest

from app.config.settings import Settings
from app.http.scope import MAX_PIECE, Bodies, RequestScope
from protocol.errors import ApiError


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return request.param


pytestmark = pytest.mark.anyio


async def no_frame(error: ApiError) -> bytes:
    return b""


def scope_of(sent: list[MutableMapping[str, Any]], body: list[bytes]) -> RequestScope:
    async def receive() -> MutableMapping[str, Any]:
        if not body:
            await anyio.sleep_forever()
        return {"type": "http.request", "body": body.pop()}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "http_version": "1.1", "query_string": b"", "headers": []}
    return RequestScope(scope, receive, send, Settings(), Bodies(None))


@pytest.mark.parametrize("leaves", ["by itself", "because it is cut"])
async def test_a_silent_stream_that_has_ended_is_not_kept_alive(leaves: str) -> None:
    sent: list[MutableMapping[str, Any]] = []
    request = scope_of(sent, [b"{}"])

    async def handler(request: RequestScope) -> None:
        await request.start_stream("text/event-stream", error_frame=no_frame, keep_alive=(0.0, b":\n\n"))
        request.tick(time.monotonic())
        await anyio.wait_all_tasks_blocked()
        assert len(sent) == 2, "it was not kept alive"
        if leaves == "because it is cut":
            request.cut()
            await anyio.sleep_forever()

    await request.run(handler)
    request.tick(time.monotonic())  # the server's task may come before the request is forgotten
    assert len(sent) == 2


async def test_long_pieces_of_a_stream_are_cut_and_nothing_comes_between() -> None:
    sent: list[MutableMapping[str, Any]] = []
    request = scope_of(sent, [b"{}"])
    event = bytes(range(256)) * 1000

    async def handler(request: RequestScope) -> None:
        await request.start_stream("text/event-stream", error_frame=no_frame, keep_alive=(0.0, b":\n\n"))
        request.tick(time.monotonic())
        await request.send_chunk(event)
        await request.end_stream(event)

    await request.run(handler)
    bodies = [message["body"] for message in sent[1:]]
    assert max(map(len, bodies)) == MAX_PIECE
    assert b"".join(bodies).replace(b":\n\n", b"") == event * 2
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(bodies) - 1) + [False]
