"""Who may come in. Pure ASGI: it wraps calls and never touches `receive()`. `refuse` makes the application that answers
with an error."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from app.tenants import Tenants
from protocol.errors import ApiError

Refuse = Callable[[ApiError], ASGIApp]

MAX_HEADERS = 128
OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/startupz", "/ping", "/dashboard", "/docs"})
OPEN_FILES = ("/dashboard/files/", "/docs/files/")  # pages hold nothing; what they show needs a key
WITHOUT_VERSION = frozenset({"chat", "completions", "embeddings", "models", "responses", "messages"})
ADMIN_PATHS = frozenset(
    {
        *("/server_info", "/engine_state", "/reset_prefix_cache", "/abort_requests", "/start_profile", "/stop_profile"),
        "/configure_logging",
    }
)
DASHBOARD_PATHS = frozenset({"/dashboard/frames", "/dashboard/simulation"})


class WithVersion:
    """Finds what clients ask for without /v1, as if they had asked with it: whatever is behind sees no other path.

    Many base URLs are written without it, and llama.cpp answers to both.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"][1:].partition("/")[0] in WITHOUT_VERSION:
            scope = {**scope, "path": "/v1" + scope["path"]}
        await self._app(scope, receive, send)


class HeaderLimit:
    """Refuses requests with too many headers (CVE-2025-48956); how long they are, the HTTP server limits."""

    def __init__(self, app: ASGIApp, *, refuse: Refuse) -> None:
        self._app = app
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (count := len(scope["headers"])) > MAX_HEADERS:
            error = ApiError(431, f"The request has {count} headers; at most {MAX_HEADERS} are taken.")
            await self._refuse(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class Authentication:
    """Asks for an API key on every path but those of probes and pages, unknown paths included, and names the tenant.
    Where there are administrators, their paths take their keys and no others, and `/metrics` takes theirs as well. What
    the dashboard shows is everybody's requests, so a client's key does not open it.

    A key comes as `Authorization: Bearer` or as `x-api-key`. The path is ASGI's `scope["path"]`: anything rebuilt from
    the Host header can be steered by the client (CVE-2026-48746).
    """

    def __init__(self, app: ASGIApp, *, tenants: Tenants, refuse: Refuse) -> None:
        self._app = app
        self._tenants = tenants
        self._no_key = refuse(_NO_KEY)
        self._no_admins = refuse(_NO_ADMINS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope):
            await self._app(scope, receive, send)
            return
        key = _key_of(scope)
        is_dashboard = scope["path"] in DASHBOARD_PATHS
        if self._tenants.administered and (is_dashboard or scope["path"] in ADMIN_PATHS):
            if key is None or not self._tenants.is_admin(key):
                await self._no_key(scope, receive, send)
                return
        elif self._tenants.required and is_dashboard:
            await self._no_admins(scope, receive, send)
            return
        elif self._tenants.required and not (scope["path"] == "/metrics" and key and self._tenants.is_admin(key)):
            tenant = None if key is None else self._tenants.find(key)
            if tenant is None:
                await self._no_key(scope, receive, send)
                return
            scope["headrace.tenant"] = tenant
        await self._app(scope, receive, send)


def _is_open(scope: Scope) -> bool:
    path = scope["path"]
    return path in OPEN_PATHS or path.startswith(OPEN_FILES) or (path == "/" and wants_page(scope))


def wants_page(scope: Scope) -> bool:
    """Whether it is a browser that asks."""
    return any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])


def _key_of(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == b"x-api-key":
            return value.strip()
    return None


_NO_KEY = ApiError(
    401,
    "A valid API key is needed: send it as 'Authorization: Bearer <key>' or as 'x-api-key: <key>'.",
    code="invalid_api_key",
    headers={"www-authenticate": "Bearer"},
)
_NO_ADMINS = ApiError(
    401,
    "This shows the requests of all tenants, so it needs an administrator's key, and the server has none: give it one "
    "with the setting admin_keys.",
    code="invalid_api_key",
    headers={"www-authenticate": "Bearer"},
)
