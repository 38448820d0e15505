"""Checks that come before every handler: the page that asks (CORS), the request's head, and the API key that its route
asks for. Pure ASGI: it wraps calls and never touches `receive()`. `refuse` makes the application that answers with an
error."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.admission.tenants import Tenants
from app.config.settings import Settings
from app.observability.logs import log_refusal
from protocol.errors import ApiError

Refuse = Callable[[ApiError], ASGIApp]
RawHeaders = Sequence[tuple[bytes, bytes]]

MAX_HEADERS = 128
WITHOUT_VERSION = frozenset(
    {
        *("chat", "completions", "embeddings", "models", "responses", "messages", "files", "batches"),
        *("rerank", "score", "classify", "pooling"),
    }
)
UPLOAD_PATH = "/v1/files"
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})  # which change nothing here
_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[^:/?#@\[\]\s]+))(?::[0-9]*)?")
_OF_CONTAINERS = frozenset({"host.docker.internal", "host.containers.internal"})  # no public name ends in .internal
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class Access(Enum):
    """The key a route requires; default CLIENT."""

    OPEN = auto()  # none: probes, and pages that hold nothing by themselves
    CLIENT = auto()  # a client's, where there are clients' keys
    CLIENT_OR_ADMIN = auto()
    ADMIN = auto()  # an administrator's, where there are keys of any kind


class HeadCheck:
    """Refuse requests with too many headers (CVE-2025-48956) or with control characters in the path. The HTTP server
    limits how long headers are. Requests without /v1 go on as if they had it: many base URLs are written without."""

    def __init__(self, app: ASGIApp, *, refuse: Refuse) -> None:
        self._app = app
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"][1:].partition("/")[0] in WITHOUT_VERSION:
            scope = {**scope, "path": "/v1" + scope["path"]}
        error = _wrong_head(scope) if scope["type"] == "http" else None
        await (self._app if error is None else self._refuse(error))(scope, receive, send)


def _wrong_head(scope: Scope) -> ApiError | None:
    if (count := len(scope["headers"])) > MAX_HEADERS:
        return ApiError(431, f"The request has {count} headers; allowed: at most {MAX_HEADERS}.")
    if _CONTROL_CHARACTERS.search(scope["path"]):
        return ApiError(400, "The path contains a control character, such as %0A; no path here has one.")
    return None


_ALLOWED_ORIGIN = "headrace.allowed_origin"
_ORIGIN_DEPENDS = (b"vary", b"Origin")  # a cache must not give one page the answer for another
_ASKED_HEADERS = re.compile(rb"[A-Za-z0-9_, -]{1,4096}")


class CrossOrigin:
    """Let web pages of the setting `allowed_origins` call the API (CORS), except the routes of the dashboard.

    A browser first asks, without a key, what a page may send (the preflight); the answer allows the headers that the
    page names, `Authorization` among them, and no cookies. Every answer to such a page, an error or a stream too, says
    that the page may read it. For other pages nothing changes.
    """

    def __init__(self, app: ASGIApp, *, origins: Sequence[str]) -> None:
        self._app = app
        self._allows_any = "*" in origins
        self._origins = {origin.lower().encode() for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/dashboard"):
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"])
        origin = given.get(b"origin", b"").lower()
        is_allowed = origin != b"" and (self._allows_any or origin in self._origins)
        headers = [] if self._allows_any else [_ORIGIN_DEPENDS]
        if is_allowed:
            headers.append((b"access-control-allow-origin", b"*" if self._allows_any else given[b"origin"]))
            if scope["method"] == "OPTIONS" and b"access-control-request-method" in given:
                headers += (b"access-control-allow-methods", b"GET, POST, DELETE"), (b"access-control-max-age", b"600")
                if _ASKED_HEADERS.fullmatch(asked := given.get(b"access-control-request-headers", b"")):
                    headers.append((b"access-control-allow-headers", asked))
                await send({"type": "http.response.start", "status": 204, "headers": headers})
                await send({"type": "http.response.body"})
                return
            headers.append((b"access-control-expose-headers", b"*"))

        async def send_allowed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        await self._app({**scope, _ALLOWED_ORIGIN: is_allowed}, receive, send_allowed)


class BrowserCheck:
    """Keep web pages from using a server without keys through a browser that can reach it.

    A page of any origin may send a POST with a body of plain text, and it can read the answers too once its own name
    resolves to the server's address (DNS rebinding). So a server without clients' keys refuses requests that change
    something, from pages of other origins, on every address. On a loopback address it refuses bodies that are not JSON,
    because a browser asks the server before it sends JSON for another origin (programs may send any to Ollama's API),
    and Host headers other than an IP address, localhost or one of `allowed_hosts`. If `allowed_hosts` is set, the Host
    header is checked on every address, with keys or without.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings, tenants: Tenants, refuse: Refuse) -> None:
        self._app = app
        self._tenants = tenants
        self._refuse = refuse
        self._is_local = settings.host == "localhost" or _is_loopback(settings.host)
        self._allowed = {name.lower() for name in settings.allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._wrong_head(scope) if scope["type"] == "http" and "*" not in self._allowed else None
        await (self._app if error is None else self._refuse(error))(scope, receive, send)

    def _wrong_head(self, scope: Scope) -> ApiError | None:
        is_open, headers = not self._tenants.required, scope["headers"]
        server = scope.get("server")
        is_local = is_open and self._is_local and server is not None and _is_loopback(server[0])
        hosts = [value for name, value in headers if name == b"host"]
        if (is_local or self._allowed) and not all(self._is_own(host) for host in hosts):
            return _wrong_host(hosts)
        may_be_foreign = scope["method"] in _SAFE_METHODS or scope.get(_ALLOWED_ORIGIN, False)
        if is_open and not may_be_foreign and self._is_foreign(headers, hosts):
            return _FOREIGN_ORIGIN
        # Clients of Ollama send JSON without saying so, and uploads are forms. A page cannot hide that it is one: its
        # POST has an Origin.
        is_program = not {b"origin", b"sec-fetch-site"} & {name for name, _ in headers}
        takes_others = is_program and scope["path"].startswith(("/api/", UPLOAD_PATH))
        return _NOT_JSON if is_local and not takes_others and _has_other_body(headers) else None

    def _is_own(self, host: bytes) -> bool:
        """Return True if the server goes by this name, a Host header or the part of an origin behind ``://``."""
        found = _HOST.fullmatch(host.decode("latin-1").lower())
        if found is None:
            return False
        name = (found["name"] or found["v6"]).removesuffix(".")
        return (
            name in self._allowed
            or name == "localhost"
            or name.endswith(".localhost")
            or name in _OF_CONTAINERS
            or _is_address(name)
        )

    def _is_foreign(self, headers: RawHeaders, hosts: Sequence[bytes]) -> bool:
        """Return True if a browser sends this for a page of another origin, by headers that no page can change. Apps
        and browser extensions pass: their origins have other schemes than http and https."""
        given = {name: value for name, value in headers if name in (b"sec-fetch-site", b"origin")}
        site = given.get(b"sec-fetch-site")
        if site in (b"same-origin", b"none"):
            return False
        scheme, _, place = given.get(b"origin", b"").lower().partition(b"://")
        if place and (scheme not in (b"http", b"https") or place.partition(b":")[0].decode("latin-1") in self._allowed):
            return False
        return site is not None or (scheme != b"" and place not in hosts)


def _wrong_host(hosts: Sequence[bytes]) -> ApiError:
    host = b", ".join(hosts).decode("latin-1")[:100]
    return ApiError(
        403,
        f"Host must be localhost, an IP address or a name in the setting allowed_hosts, got {host!r}. Add the name to "
        "allowed_hosts if clients may use it.",
        code="wrong_host",
    )


def _has_other_body(headers: RawHeaders) -> bool:
    """Return True if the request has a body, and its Content-Type is not JSON."""
    given = {name: value.strip().lower() for name, value in headers}
    has_body = given.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in given
    kinds = [value.partition(b";")[0].strip().lower() for name, value in headers if name == b"content-type"]
    return any(kind != b"application/json" for kind in kinds or [b""] * has_body)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return _is_address(name) and ipaddress.ip_address(name).is_loopback


class Authentication:
    """Check the API key that the matched route asks for, and set the tenant in the ASGI scope.

    The route that the router will match decides, not the path: if the check read a path differently, a request could
    pass it with the wrong key and still reach a protected handler. A path that no route matches takes a client's key,
    so that only clients learn which paths there are. The dashboard shows the requests of all tenants, so a client's key
    does not open it.

    A key comes as `Authorization: Bearer` or as `x-api-key`. Routes match ASGI's `scope["path"]`: anything rebuilt from
    the Host header can be steered by the client (CVE-2026-48746).
    """

    def __init__(
        self, app: ASGIApp, *, routes: Sequence[BaseRoute], tenants: Tenants, refuse: Refuse, log: bool
    ) -> None:
        self._app = app
        self._routes = routes
        self._tenants = tenants
        self._refuse = refuse
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._wrong_key(scope) if scope["type"] == "http" else None
        if error is not None and self._log:
            log_refusal(scope, error)
        await (self._app if error is None else self._refuse(error))(scope, receive, send)

    def _wrong_key(self, scope: Scope) -> ApiError | None:
        """Return the error for a wrong or missing key. Otherwise return None, and set the tenant of a client's key."""
        tenants, access = self._tenants, self._access(scope)
        if access is Access.OPEN:
            return None
        key = _key_of(scope)
        wrong = _WRONG_KEY if key else _NO_KEY
        is_admin = key is not None and tenants.is_admin(key)
        if access is Access.ADMIN:
            if tenants.administered:
                return None if is_admin else wrong
            return _NO_ADMINS if tenants.required else None
        if not tenants.required or (access is Access.CLIENT_OR_ADMIN and is_admin):
            return None
        tenant = None if key is None else tenants.find(key)
        if tenant is None:
            return wrong
        scope["headrace.tenant"] = tenant
        return None

    def _access(self, scope: Scope) -> Access:
        """Return the access of the route that will match: the first of this path and method, else of this path."""
        partial: BaseRoute | None = None
        for route in self._routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return _access_of(route)
            if match is Match.PARTIAL and partial is None:
                partial = route
        return Access.CLIENT if partial is None else _access_of(partial)


def _access_of(route: BaseRoute) -> Access:
    return getattr(getattr(route, "endpoint", None), "access", Access.CLIENT)


def wants_page(scope: Scope) -> bool:
    return any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])


def _key_of(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == b"x-api-key":
            return value.strip()
    return None


_unauthorized = partial(ApiError, 401, headers={"www-authenticate": "Bearer"})
_NO_KEY = _unauthorized(
    "An API key is needed: send it as 'Authorization: Bearer <key>' or as 'x-api-key: <key>'.", code="missing_api_key"
)
_WRONG_KEY = _unauthorized(
    "The API key is not valid for this path: it is mistyped, was withdrawn, or is a client's key where an "
    "administrator's is needed, or the other way round. Send another key.",
    code="invalid_api_key",
)
_NO_ADMINS = _unauthorized(
    "This concerns all tenants, so it needs an administrator's key, and the server has none: give it one "
    "with the setting admin_keys.",
    code="invalid_api_key",
)
_FOREIGN_ORIGIN = ApiError(
    403,
    "A web page of another origin sent this request, and the server has no API keys. Set api_keys, or add the page's "
    "origin to the setting allowed_origins.",
    code="foreign_origin",
)
_NOT_JSON = ApiError(
    415,
    "The Content-Type of the body must be application/json (curl: -H 'Content-Type: application/json'), because this "
    "server has no API keys and any web page can send other types.",
    code="unsupported_content_type",
)
