"""Who may come in. Pure ASGI: it wraps calls and never touches `receive()`."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from protocol.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/startupz"})


class Authentication:
    """Asks for an API key on every path but the probes', unknown paths included.

    A key comes as `Authorization: Bearer` or as `x-api-key`. It is compared with all keys in constant time. The path is
    ASGI's `scope["path"]`: anything rebuilt from the Host header can be steered by the client (CVE-2026-48746). A
    request's tenant is a digest of its key, so that the key itself travels no further than this.
    """

    def __init__(self, app: ASGIApp, *, api_keys: Iterable[str]) -> None:
        self._app = app
        self._tenants = {key.encode(): hashlib.sha256(key.encode()).hexdigest()[:16] for key in api_keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._tenants and scope["path"] not in OPEN_PATHS:
            tenant = self._tenant_of(scope)
            if tenant is None:
                await _refuse(send)
                return
            scope["headrace.tenant"] = tenant
        await self._app(scope, receive, send)

    def _tenant_of(self, scope: Scope) -> str | None:
        given = b""
        for name, value in scope["headers"]:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                given = value[7:].strip()
                break
            if name == b"x-api-key":
                given = value.strip()
        found = None
        for key, tenant in self._tenants.items():
            if hmac.compare_digest(given, key):
                found = tenant
        return found


async def _refuse(send: Send) -> None:
    error = ApiError(
        401,
        "A valid API key is needed: send it as 'Authorization: Bearer <key>' or as 'x-api-key: <key>'.",
        code="invalid_api_key",
    )
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": error.body()})
