"""/openapi.json and /docs: what can be asked here, for programs and for people. Made when they are first asked for."""

from __future__ import annotations

from functools import cache

import orjson
from anyio import to_thread

from app.docs_page import render
from app.routes.probes import VERSION
from app.scope import Handler, RequestScope
from protocol.openapi import document

# A browser loads nothing for this page, from here or from elsewhere.
_PAGE_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


def openapi() -> Handler:
    """The handler of GET /openapi.json."""

    async def handler(request: RequestScope) -> None:
        await request.send_json(200, await to_thread.run_sync(_description))

    return handler


def docs() -> Handler:
    """The handler of GET /docs: one page without scripts, pictures or anything from elsewhere."""

    async def handler(request: RequestScope) -> None:
        await request.send_body(200, await to_thread.run_sync(_page), "text/html; charset=utf-8", _PAGE_HEADERS)

    return handler


@cache
def _description() -> bytes:
    return orjson.dumps(document(VERSION))


@cache
def _page() -> bytes:
    return render(document(VERSION)).encode()
