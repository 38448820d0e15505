"""/openapi.json and /docs: what can be asked here, for programs and for people. Made when they are first asked for."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import orjson
from anyio import to_thread

from app.dashboard.files import SAME_ORIGIN, PageFiles, read_folder
from app.routes.probes import VERSION
from app.scope import RequestScope
from app.server import Server
from protocol.errors import ApiError
from protocol.openapi import document
from protocol.operations import ADMINISTRATION, OPERATIONS, TOKENIZER_INFO

_OF_SWAGGER_UI = ("swagger-ui-bundle.js", "swagger-ui.css")


def _files() -> dict[str, bytes]:
    """The page's own files, and Swagger UI's out of its package, of which no Python is run."""
    package = find_spec("swagger_ui")
    assert package is not None
    assert package.origin is not None
    static = Path(package.origin).parent / "static"
    return read_folder(Path(__file__).parents[1] / "dashboard" / "docs") | {
        name: (static / name).read_bytes() for name in _OF_SWAGGER_UI
    }


_PAGE = PageFiles(_files, SAME_ORIGIN)


async def openapi(server: Server, request: RequestScope) -> None:
    """GET /openapi.json."""
    sampling: dict[str, float | None] = {}
    with suppress(ApiError):  # while the model is loaded, it is not known yet what its authors recommend
        sampling |= server.model.default_sampling
    sampling.pop("max_tokens", None)  # for which some APIs have a default of their own
    given = (server.settings.enable_tokenizer_info_endpoint, server.tenants.administered, *sampling.items())
    await request.send_json(200, await to_thread.run_sync(_description, *given))


async def docs(server: Server, request: RequestScope) -> None:
    """GET /docs: Swagger UI, with nothing from elsewhere."""
    await _PAGE.send(request, "index.html")


async def docs_file(server: Server, request: RequestScope) -> None:
    """GET /docs/files/{name}: its scripts and styles."""
    await _PAGE.send(request, request.path_params["name"])


@cache
def _description(tokenizer_info: bool, administered: bool, *sampling: tuple[str, float | None]) -> bytes:
    extra = (TOKENIZER_INFO if tokenizer_info else ()) + (ADMINISTRATION if administered else ())
    return orjson.dumps(document(VERSION, OPERATIONS + extra, dict(sampling)))
