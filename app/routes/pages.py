"""The dashboard, /docs and /openapi.json.

The files of a page are read once, at the first request. A browser asks whether a file has changed (`ETag`), so that the
files of two versions are never mixed.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import orjson
from anyio import to_thread

from app.dashboard.feed import Feed
from app.dashboard.history import History
from app.dashboard.simulator import Simulator
from app.http.middleware import wants_page
from app.http.scope import RequestScope
from app.routes.operations import VERSION
from app.serving.model_pool import ModelPool
from app.serving.server import Server
from protocol.errors import ApiError
from protocol.openai.batches import BATCH_OPERATIONS
from protocol.openapi import document
from protocol.registry import ADMINISTRATION, OPERATIONS, TOKENIZER_INFO

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
SAME_ORIGIN = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class _File(NamedTuple):
    content: bytes
    compressed: bytes
    content_type: str
    digest: str


class PageFiles:
    """The files of a page. `read` returns them by name; it is called once, on a thread."""

    def __init__(self, read: Callable[[], Mapping[str, bytes]], policy: str = SAME_ORIGIN) -> None:
        self._read = read
        self._files: dict[str, _File] | None = None
        self._headers = {
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
            "vary": "accept-encoding",
        }

    async def send(self, request: RequestScope, name: str) -> None:
        """Answer with a file, or with 304 if the browser has it. Raises ApiError 404."""
        if self._files is None:
            self._files = await to_thread.run_sync(self._load)
        if (file := self._files.get(name)) is None:
            raise ApiError(404, f"There is nothing at {request.path[:200]!r}.")
        headers = self._headers | {"etag": file.digest}
        if request.headers.get("if-none-match") == file.digest:
            await request.send_body(304, b"", file.content_type, headers)
        elif "gzip" in request.headers.get("accept-encoding", ""):
            await request.send_body(200, file.compressed, file.content_type, headers | {"content-encoding": "gzip"})
        else:
            await request.send_body(200, file.content, file.content_type, headers)

    def _load(self) -> dict[str, _File]:
        return {
            name: _File(
                content,
                gzip.compress(content, mtime=0),
                TYPES[Path(name).suffix],
                f'"{hashlib.sha256(content).hexdigest()[:32]}"',
            )
            for name, content in self._read().items()
        }


async def page(files: PageFiles, server: Server, request: RequestScope) -> None:
    """GET /docs, /dashboard and, below their `files`, their scripts and styles."""
    await files.send(request, request.path_params.get("name", "index.html"))


def read_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in TYPES}


# ------------------------------------------------------------------------------------------------------------ documents
# /openapi.json and /docs: the description of the API, for programs and for people. Made at the first request.


_OF_SWAGGER_UI = ("swagger-ui-bundle.js", "swagger-ui.css")


def _files() -> dict[str, bytes]:
    """Return the page's own files, and those of Swagger UI from its package, without running its Python."""
    package = find_spec("swagger_ui")
    assert package is not None
    assert package.origin is not None
    static = Path(package.origin).parent / "static"
    return read_folder(Path(__file__).parents[1] / "dashboard" / "docs") | {
        name: (static / name).read_bytes() for name in _OF_SWAGGER_UI
    }


DOCS = PageFiles(_files, SAME_ORIGIN)  # Swagger UI, without files of other hosts
_DESCRIBING = Lock()  # the first requests, at once, would each make the document: seconds for the whole process


async def openapi(pool: ModelPool, request: RequestScope) -> None:
    """GET /openapi.json: the description for programs."""
    sampling: dict[str, float | None] = {}
    with suppress(ApiError):  # before the model is loaded, the recommendations of its authors are not known
        sampling |= pool.model.default_sampling
    sampling.pop("max_tokens", None)  # some APIs have their own default
    server = pool.server
    settings = server.settings
    given = settings.enable_tokenizer_info_endpoint, server.tenants.administered, settings.files_dir is not None
    await request.send_json(200, await to_thread.run_sync(_described, *given, *sampling.items()))


def _described(*given: Any) -> bytes:
    with _DESCRIBING:
        return _description(*given)


@cache
def _description(
    tokenizer_info: bool, administered: bool, keeps_files: bool, *sampling: tuple[str, float | None]
) -> bytes:
    extra = (TOKENIZER_INFO if tokenizer_info else ()) + (ADMINISTRATION if administered else ())
    extra += BATCH_OPERATIONS if keeps_files else ()
    return orjson.dumps(document(VERSION, OPERATIONS + extra, dict(sampling)))


# ------------------------------------------------------------------------------------------------------------ dashboard
# /dashboard with its data, and / for browsers.


DASHBOARD = PageFiles(lambda: read_folder(Path(__file__).parents[1] / "dashboard" / "page"))  # without data
KEEP_ALIVE = (15.0, b": nothing new\n\n")


async def home(server: Server, request: RequestScope) -> None:
    """GET /: redirect browsers to the dashboard, and answer programs as Ollama does, by which its clients know it."""
    if not wants_page(request.asgi_scope):
        await request.send_body(200, b"Ollama is running", "text/plain; charset=utf-8", {"vary": "accept"})
        return
    await request.send_body(303, b"", "text/plain", {"location": "dashboard", "vary": "accept"})


async def frames(feed: Feed, server: Server, request: RequestScope) -> None:
    """GET /dashboard/frames: the live frames as server-sent events, until the client leaves."""
    with feed.page() as events:

        async def last_event(error: ApiError) -> bytes:
            return b"event: end\ndata: {}\n\n"

        await request.start_stream("text/event-stream", error_frame=last_event, keep_alive=KEEP_ALIVE)
        async for event in events:
            await request.send_chunk(event)
        await request.end_stream(b"event: end\ndata: {}\n\n")


async def history(past: History, server: Server, request: RequestScope) -> None:
    """GET /dashboard/history?span=15m: figures over time, and what is served."""
    await request.send_json(200, past.answer(request.query_fields().get("span", "15m")))


async def simulation(simulator: Simulator, server: Server, request: RequestScope) -> None:
    """POST /dashboard/simulation: one slice of a simulation."""
    await request.send_json(200, await simulator.answer(request.body))
