"""The feed's places: a page that does not read gives its place to one that does."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import cast

import anyio
import pytest

from app.dashboard.feed import MAX_BEHIND, MAX_PAGES, Feed
from app.serving.model_pool import ModelPool
from protocol.errors import ApiError


def test_unread_pages_make_room_and_pages_that_are_read_do_not() -> None:
    async def look() -> None:
        server = SimpleNamespace(start_soon=lambda look: None)
        feed = Feed(cast(ModelPool, SimpleNamespace(model=None, server=server)))
        with ExitStack() as stack:
            pages = [stack.enter_context(feed.page()) for _ in range(MAX_PAGES)]
            for _ in range(MAX_BEHIND):
                feed._send(b"frame")
                for page in pages[1:]:
                    assert page.receive_nowait() == b"frame"
            stack.enter_context(feed.page())
            with pytest.raises(ApiError, match=f"{MAX_PAGES} dashboards"):
                stack.enter_context(feed.page())
            assert [frame async for frame in pages[0]] == [b"frame"] * MAX_BEHIND, "it gets what waits for it, and ends"
            feed._send(b"more")
            assert pages[1].receive_nowait() == b"more"

    anyio.run(look)


def test_pages_of_a_model_that_has_gone_get_nothing_more() -> None:
    def unloaded(pool: object) -> object:
        raise ApiError(503, "No model is loaded at the moment.")

    class Pool:
        model, server, current = None, SimpleNamespace(start_soon=lambda look: None, phase="ready"), property(unloaded)

    async def look() -> None:
        feed = Feed(cast(ModelPool, Pool()))
        with feed.page() as stays_open:
            await feed._run()
            feed._send(b"of the next model")
            assert [frame async for frame in stays_open] == []

    anyio.run(look)
