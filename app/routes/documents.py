"""/openapi.json and /docs: what can be asked here, for programs and for people. Made when they are first asked for."""

from __future__ import annotations

from functools import cache
from typing import Any

import orjson
from anyio import to_thread

from app.docs_page import render
from app.routes.probes import VERSION
from app.scope import RequestScope
from app.server import Server
from protocol.openapi import document
from protocol.operations import ADMINISTRATION, OPERATIONS

# A browser loads nothing for this page, from here or from elsewhere.
_PAGE_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


async def openapi(server: Server, request: RequestScope) -> None:
    """GET /openapi.json."""
    await request.send_json(200, await to_thread.run_sync(_description, server.tenants.administered))


async def docs(server: Server, request: RequestScope) -> None:
    """GET /docs: one page without scripts, pictures or anything from elsewhere."""
    page = await to_thread.run_sync(_page, server.tenants.administered)
    await request.send_body(200, page, "text/html; charset=utf-8", _PAGE_HEADERS)


@cache
def _description(administered: bool) -> bytes:
    return orjson.dumps(_document(administered))


@cache
def _page(administered: bool) -> bytes:
    return render(_document(administered)).encode()


def _document(administered: bool) -> dict[str, Any]:
    return document(VERSION, OPERATIONS + ADMINISTRATION if administered else OPERATIONS)
