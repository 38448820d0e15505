"""Every protected route with every byte before, in and behind its path: no spelling opens what the route protects."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

import anyio
import pytest
from starlette.types import ASGIApp

from app.application import create_app
from app.config.settings import Settings
from tests.support.harness import Server

CLIENT, ADMIN = "client-key", "admin-key"
OPEN = {
    *("/", "/livez", "/readyz", "/startupz", "/health", "/ping", "/docs", "/dashboard"),
    *("/docs/files/{name}", "/dashboard/files/{name}"),
}
ADMINISTRATION = {
    *("/server_info", "/engine_state", "/reset_prefix_cache", "/abort_requests", "/start_profile", "/stop_profile"),
    *("/configure_logging", "/dashboard/frames", "/dashboard/history", "/dashboard/simulation", "/api/pull"),
}
BYTES = [f"%{number:02x}" for number in range(256)]


def spellings(path: str) -> Iterator[str]:
    """Yield the path with each byte in front, before its last word, in that word, and at its end."""
    word = path.rindex("/") + 1
    for place in (0, word, (word + len(path)) // 2, len(path)):
        for byte in BYTES:
            yield path[:place] + byte + path[place:]


async def status_of(
    app: ASGIApp,
    method: str,
    path: str,
    key: str | None,
    more_headers: Mapping[str, str] = MappingProxyType({}),
    server: tuple[str, int] | None = None,
) -> int:
    """The status of the answer to a request with this path, percent-encoded as clients send it."""
    headers = [(name.encode(), value.encode("latin-1")) for name, value in more_headers.items()]
    if key is not None and "x-api-key" not in more_headers:
        headers.append((b"x-api-key", key.encode()))
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": unquote(path),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "server": server,
    }
    statuses: list[int] = []
    body: Iterator[dict[str, Any]] = iter([{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in body:
            return message
        await anyio.sleep_forever()  # the client stays
        raise AssertionError

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app(scope, receive, send)
    [status] = statuses
    return status


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "refusals"), [(None, {400, 401}), (CLIENT, {400, 401, 404, 405})], ids=["no key", "client's key"]
)
def test_no_byte_in_a_path_opens_a_route(key: str | None, refusals: set[int]) -> None:
    """A handler that was reached answers 200, or 503 because there is no model."""
    app = create_app(Settings(api_keys=(CLIENT,), admin_keys=(ADMIN,), enable_tokenizer_info_endpoint=True))
    routes = [(min(route.methods - {"HEAD"}), route.path) for route in app.routes if route.path not in OPEN]  # type: ignore[attr-defined]
    assert {path for _, path in routes} >= ADMINISTRATION
    if key is not None:  # clients may have what is theirs, under names of every kind
        routes = [(method, path) for method, path in routes if path in ADMINISTRATION]

    async def try_all() -> set[tuple[str, int]]:
        return {
            (spelling, status)
            for method, template in routes
            for spelling in [template, *spellings(re.sub("{[^}]*}", "name", template))]
            if (status := await status_of(app, method, spelling, key)) not in refusals
        }

    assert anyio.run(try_all) == set()


def test_a_prefix_that_the_server_is_mounted_under_opens_nothing() -> None:
    app = create_app(Settings(api_keys=(CLIENT,), admin_keys=(ADMIN,)))

    async def mounted(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "root_path": "/behind/proxy", "path": "/behind/proxy" + scope["path"]}, receive, send)

    async def status(key: str | None) -> int:
        return await status_of(mounted, "GET", "/server_info", key)

    assert [anyio.run(status, key) for key in (None, CLIENT, ADMIN)] == [401, 401, 503]


@pytest.fixture(scope="module")
def governed() -> Iterator[Server]:
    with Server("uvloop", api_keys=CLIENT, admin_keys=ADMIN, max_num_seqs=4) as running:
        running.poll(lambda: running.get_or_none("/livez"), lambda answer: answer is not None)
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(ADMINISTRATION))
def test_no_byte_on_the_wire_opens_an_administrators_route(governed: Server, path: str) -> None:
    """Over HTTP/1.1: all percent-encoded bytes on one connection, and raw bytes, which may end theirs."""
    for spelling in [path + byte for byte in BYTES] + [byte + path for byte in ("%0a", "%0d", "%00", "/", "//")]:
        url = f"{governed.base_url}/{spelling.removeprefix('/')}"  # whole: httpx takes //name for the name of a host
        status = governed.client.get(url, headers={"x-api-key": CLIENT}).status_code
        assert status in (400, 401, 404, 405), spelling
    for number in [*range(33), 35, 63, 127, 128, 255]:
        target = path.encode() + bytes([number])
        with governed.connect() as client:
            client.send_bytes(b"GET " + target + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            client.be_patient_for(30)
            try:
                answer = client.read_raw()
            except (TimeoutError, ConnectionError):
                continue
        assert not answer or answer.split()[1] in (b"400", b"401"), target


def test_a_control_character_in_a_path_is_400_for_everybody(governed: Server) -> None:
    for path in ("/livez%0a", "/v1/models%00", "/v1/models/a%7f", "/%1b[2J", "/v1/models/%c2%85"):
        for key in ("", CLIENT, ADMIN):
            answer = governed.client.get(path, headers={"x-api-key": key})
            assert answer.status_code == 400, path
            assert "control character" in answer.json()["error"]["message"]
