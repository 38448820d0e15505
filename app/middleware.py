"""Who may come in. Pure ASGI: it wraps calls and never touches `receive()`."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from app.tenants import Tenant, Tenants
from protocol.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/startupz"})


class Authentication:
    """Asks for an API key on every path but the probes', unknown paths included, and names the tenant.

    A key comes as `Authorization: Bearer` or as `x-api-key`. The path is ASGI's `scope["path"]`: anything rebuilt from
    the Host header can be steered by the client (CVE-2026-48746).
    """

    def __init__(self, app: ASGIApp, *, tenants: Tenants) -> None:
        self._app = app
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._tenants.required and scope["path"] not in OPEN_PATHS:
            tenant = self._tenant_of(scope)
            if tenant is None:
                await _refuse(send)
                return
            scope["headrace.tenant"] = tenant
        await self._app(scope, receive, send)

    def _tenant_of(self, scope: Scope) -> Tenant | None:
        for name, value in scope["headers"]:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                return self._tenants.find(value[7:].strip())
            if name == b"x-api-key":
                return self._tenants.find(value.strip())
        return None


async def _refuse(send: Send) -> None:
    error = ApiError(
        401,
        "A valid API key is needed: send it as 'Authorization: Bearer <key>' or as 'x-api-key: <key>'.",
        code="invalid_api_key",
    )
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": error.body()})
