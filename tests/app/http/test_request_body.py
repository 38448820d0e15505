"""Limits of one body (by the context) and of all bodies together (a request frees its part when it ends)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import anyio
import pytest

from app.config.settings import Settings
from app.http import scope as request_body
from app.http.scope import Bodies, RequestScope

KIB, MIB = 2**10, 2**20


async def answer_to(bodies: Bodies, pieces: Iterable[bytes], meanwhile: Any = None) -> tuple[int, bytes]:
    """Status and body of the answer to a request whose body comes in these pieces."""
    answer: list[Any] = []
    rest = iter(pieces)

    async def receive() -> dict[str, Any]:
        piece = next(rest, None)
        if piece is None:
            await anyio.sleep_forever()
        return {"type": "http.request", "body": piece, "more_body": piece != b"."}

    async def send(message: Any) -> None:
        answer.append(message)

    async def handler(request: RequestScope) -> None:
        if meanwhile is not None:
            await meanwhile()
        await request.send_json(200, b"{}")

    scope: dict[str, Any] = {
        "type": "http", "method": "POST", "path": "/v1/completions", "http_version": "1.1", "query_string": b"",
        "headers": [],
    }  # fmt: skip
    await RequestScope(scope, receive, send, Settings(), bodies).run(handler)
    return answer[0]["status"], b"".join(message.get("body", b"") for message in answer)


def test_the_largest_body_follows_from_the_context_unless_it_is_set() -> None:
    bodies = Bodies(None)
    for context, largest in ((0, 4 * MIB), (2**13, 4.5 * MIB), (2**20, 68 * MIB)):
        bodies.follow_context(context)
        assert bodies.max_bytes == largest
    given = Bodies(MIB)
    given.follow_context(2**20)
    assert given.max_bytes == MIB


@pytest.mark.anyio
async def test_bodies_that_are_too_much_together_are_refused_until_others_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_requests = 32
    monkeypatch.setattr(request_body, "MAX_BYTES_IN_ALL", num_requests * KIB)
    bodies = Bodies(KIB)
    piece, ended = b"x" * (KIB - 1), anyio.Event()
    statuses: list[int] = []

    async def one() -> None:
        statuses.append((await answer_to(bodies, [piece, b"."], ended.wait))[0])

    async with anyio.create_task_group() as group:
        for _ in range(num_requests):
            group.start_soon(one)
        await anyio.wait_all_tasks_blocked()
        assert bodies.num_held == num_requests * KIB
        status, body = await answer_to(bodies, [b"."])
        assert status == 503
        assert b"too_many_bodies" in body
        assert bodies.num_held == num_requests * KIB
        ended.set()
    assert statuses == [200] * num_requests
    assert bodies.num_held == 0
    assert (await answer_to(bodies, [b"."]))[0] == 200


@pytest.mark.anyio
async def test_a_body_that_is_refused_halfway_gives_back_what_it_had() -> None:
    bodies = Bodies(KIB)
    status, _ = await answer_to(bodies, [b"x" * KIB, b"."])
    assert (status, bodies.num_held) == (413, 0)
