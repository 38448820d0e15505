"""/dashboard and what it shows, and / for whoever opens the server's address in a browser."""

from __future__ import annotations

from pathlib import Path

from app.dashboard.feed import Feed
from app.dashboard.files import PageFiles, read_folder
from app.dashboard.simulator import Simulator
from app.middleware import wants_page
from app.scope import RequestScope
from app.server import Server
from protocol.errors import ApiError

_FILES = PageFiles(lambda: read_folder(Path(__file__).parents[1] / "dashboard" / "page"))
KEEP_ALIVE = (15.0, b": nothing new\n\n")


async def home(server: Server, request: RequestScope) -> None:
    """GET /: a person arrives at the dashboard; programs are told what they always were."""
    if not wants_page(request.asgi_scope):
        raise ApiError(404, "There is nothing at '/'.")
    await request.send_body(303, b"", "text/plain", {"location": "dashboard", "vary": "accept"})


async def page(server: Server, request: RequestScope) -> None:
    """GET /dashboard: the page itself, which holds nothing."""
    await _FILES.send(request, "index.html")


async def file(server: Server, request: RequestScope) -> None:
    """GET /dashboard/files/{name}: its scripts and styles."""
    await _FILES.send(request, request.path_params["name"])


async def frames(feed: Feed, server: Server, request: RequestScope) -> None:
    """GET /dashboard/frames: server-sent events, as long as somebody looks."""
    with feed.page() as events:

        async def last_event(error: ApiError) -> bytes:
            return b"event: end\ndata: {}\n\n"

        await request.start_stream("text/event-stream", error_frame=last_event, keep_alive=KEEP_ALIVE)
        async for event in events:
            await request.send_chunk(event)
        await request.end_stream(b"event: end\ndata: {}\n\n")


async def simulation(simulator: Simulator, server: Server, request: RequestScope) -> None:
    """POST /dashboard/simulation: a piece of a simulation."""
    await request.send_json(200, await simulator.answer(request.body))
