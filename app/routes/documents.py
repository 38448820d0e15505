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
from protocol.operations import ADMINISTRATION, OPERATIONS, TOKENIZER_INFO

# A browser loads nothing for this page, from here or from elsewhere.
_PAGE_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


async def openapi(server: Server, request: RequestScope) -> None:
    """GET /openapi.json."""
    await request.send_json(200, await to_thread.run_sync(_description, *_offered(server)))


async def docs(server: Server, request: RequestScope) -> None:
    """GET /docs: one page without scripts, pictures or anything from elsewhere."""
    page = await to_thread.run_sync(_page, *_offered(server))
    await request.send_body(200, page, "text/html; charset=utf-8", _PAGE_HEADERS)


def _offered(server: Server) -> tuple[bool, bool]:
    return server.settings.enable_tokenizer_info_endpoint, server.tenants.administered


@cache
def _description(tokenizer_info: bool, administered: bool) -> bytes:
    return orjson.dumps(_document(tokenizer_info, administered))


@cache
def _page(tokenizer_info: bool, administered: bool) -> bytes:
    return render(_document(tokenizer_info, administered)).encode()


def _document(tokenizer_info: bool, administered: bool) -> dict[str, Any]:
    extra = (TOKENIZER_INFO if tokenizer_info else ()) + (ADMINISTRATION if administered else ())
    return document(VERSION, OPERATIONS + extra)
