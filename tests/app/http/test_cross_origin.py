"""Web pages of allowed origins, as a browser speaks for them: they may call the API and read every answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.config.settings import Settings, SettingsError
from app.config.sources import load_settings
from tests.support.harness import Server
from tests.support.tiny_model import tiny_server

PAGE, EVIL = "https://chat.example.com", "https://evil.example.com"
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
HEADERS = "authorization, content-type, x-stainless-lang, x-stainless-retry-count"
KEY = "sk-page"


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    """A server with keys, for two pages."""
    with tiny_server(allowed_origins=f'["{PAGE}", "app://desktop"]', api_keys=KEY, admin_keys="sk-admin") as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def open_server() -> Iterator[Server]:
    """A server without keys, on a loopback address."""
    with tiny_server(allowed_origins=PAGE) as server:
        yield server.wait_ready()


def preflight(server: Server, origin: str, path: str = CHAT, headers: str = HEADERS) -> httpx.Response:
    """The request that a browser makes before it sends a page's request: no key, no body."""
    asked = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": headers}
    return server.client.options(path, headers={**asked, "sec-fetch-mode": "cors", "sec-fetch-site": "cross-site"})


def send(server: Server, origin: str, path: str = CHAT, *, key: str | None = KEY, **fields: Any) -> httpx.Response:
    headers = {"origin": origin, "sec-fetch-mode": "cors", "sec-fetch-site": "cross-site"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    return server.post(path, BODY | fields, **headers)


def readable(answer: httpx.Response, origin: str = PAGE) -> bool:
    """Return True if a browser hands the answer and its headers to the page."""
    allowed = answer.headers.get("access-control-allow-origin")
    return allowed == origin and answer.headers["access-control-expose-headers"] == "*"


@pytest.mark.slow
@pytest.mark.parametrize("origin", [PAGE, "app://desktop"])
def test_a_preflight_is_answered_without_a_key_and_allows_the_header_of_the_key(locked: Server, origin: str) -> None:
    answer = preflight(locked, origin)
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["access-control-allow-origin"] == origin
    assert {"GET", "POST", "DELETE"} <= set(answer.headers["access-control-allow-methods"].split(", "))
    assert answer.headers["access-control-allow-headers"] == HEADERS
    assert "access-control-allow-credentials" not in answer.headers
    assert "Origin" in answer.headers["vary"], "a cache must not give it to another page"
    assert preflight(locked, origin, "/chat/completions").status_code == 204
    assert preflight(locked, origin, "/v1/nowhere").status_code == 204, "the page may read that nothing is there"


def test_a_preflight_repeats_names_of_headers_and_nothing_else(locked: Server) -> None:
    answer = preflight(locked, PAGE, headers="x-a: evil")
    assert "access-control-allow-headers" not in answer.headers


def test_every_answer_may_be_read_also_errors_and_streams(locked: Server) -> None:
    expected: list[tuple[int, dict[str, Any]]] = [
        (200, {}),
        (400, {"max_tokens": -5}),
        (404, {"model": "other"}),
        (404, {"path": "/v1/nowhere"}),
        (405, {"path": "/livez"}),
        (401, {"key": None}),
        (401, {"key": "wrong"}),
    ]
    for status, how in expected:
        answer = send(locked, PAGE, **how)
        assert answer.status_code == status
        assert readable(answer), answer.headers
    for status, headers in (431, {f"x-{number}": "a" for number in range(200)}), (200, {"x-api-key": KEY}):
        answer = locked.client.get("/v1/models", headers={"origin": PAGE, **headers})
        assert (answer.status_code, readable(answer)) == (status, True)
    stream = send(locked, PAGE, stream=True)
    assert stream.text.endswith("data: [DONE]\n\n")
    assert readable(stream)


@pytest.mark.slow
def test_other_pages_get_what_they_get_without_the_setting(locked: Server, open_server: Server) -> None:
    for origin in (EVIL, "null", f"{PAGE}.evil.example", PAGE.replace("https", "http"), f"{PAGE}:8443"):
        assert preflight(locked, origin).status_code == 401
        assert preflight(open_server, origin).status_code == 405
        assert send(open_server, origin, key=None).json()["error"]["code"] == "foreign_origin"
        answers = [preflight(locked, origin), preflight(open_server, origin), send(locked, origin)]
        answers += [send(open_server, origin, key=None), send(locked, origin, key=None)]
        for answer in answers:
            assert "access-control-allow-origin" not in answer.headers
    assert "access-control-allow-origin" not in locked.client.get("/livez").headers, "not a page"


def test_a_server_without_keys_lets_the_page_in_and_keeps_its_other_checks(open_server: Server) -> None:
    assert preflight(open_server, PAGE).status_code == 204
    answer = send(open_server, PAGE, key=None)
    assert (answer.status_code, readable(answer)) == (200, True)
    headers = {"origin": PAGE, "sec-fetch-site": "cross-site"}
    rebound = open_server.post(CHAT, BODY, host="evil.example.com", **headers)
    assert (rebound.status_code, rebound.json()["error"]["code"]) == (403, "wrong_host")
    plain = open_server.client.post(CHAT, content=b"{}", headers={**headers, "content-type": "text/plain"})
    assert plain.status_code == 415
    assert readable(plain)


@pytest.mark.parametrize("path", ["/dashboard/frames", "/dashboard"])
def test_the_dashboard_is_for_its_own_pages_only(locked: Server, open_server: Server, path: str) -> None:
    for server in (locked, open_server):
        headers = {"origin": PAGE, "authorization": "Bearer sk-admin"}
        with server.client.stream("GET", path, headers=headers) as answer:
            assert answer.status_code == 200
            assert "access-control-allow-origin" not in answer.headers
        assert preflight(server, PAGE, path).status_code in (401, 405)
        with server.client.stream("GET", path, headers=headers | {"origin": server.base_url}) as own:
            assert own.status_code == 200
    simulation = open_server.post("/dashboard/simulation", {}, origin=PAGE, **{"sec-fetch-site": "cross-site"})
    assert simulation.json()["error"]["code"] == "foreign_origin"
    own_page = open_server.post("/dashboard/simulation", {}, origin=open_server.base_url)
    assert own_page.status_code not in (401, 403, 405)


@pytest.mark.slow
def test_a_star_allows_every_page_and_names_none() -> None:
    with tiny_server(allowed_origins="*") as server:
        server.wait_ready()
        for origin in (PAGE, EVIL, "null"):
            assert preflight(server, origin).headers["access-control-allow-origin"] == "*"
            answer = send(server, origin, key=None)
            assert (answer.status_code, readable(answer, "*")) == (200, True)
            assert "vary" not in answer.headers


@pytest.mark.parametrize(
    "origin",
    [
        *[
            "chat.example.com",
            f"{PAGE}/",
            f"{PAGE}/path",
            "https://*.example.com",
            "null",
            "",
            "https://a:b",
            "https://:1",
        ],
        *[
            "https://a.example:443",
            "HTTP://a.example:80",
            "https://b\u00fccher.example",
            "https://a.example:",
            "a://b\n",
        ],
    ],
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(SettingsError, match="allowed_origins: got .*A value that works: https://chat.example.com"):
        load_settings({"allowed_origins": [origin]})
    works = (
        "https://a.example,http://localhost:3000,http://[::1]:443,https://a_b.xn--bcher-kva.example,tauri://localhost"
    )
    assert load_settings({"allowed_origins": works}).allowed_origins == tuple(works.split(","))
    assert Settings().allowed_origins == ()
