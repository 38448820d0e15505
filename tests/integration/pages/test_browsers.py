"""Web pages of strangers, in the browser of whoever runs a server without keys: they neither use it nor read it."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from app.application import create_app
from app.config.settings import Settings
from tests.app.routes.test_protected_paths import status_of
from tests.support.harness import Server

JSON = {"content-type": "application/json"}
BODY = {"content-length": "2"}
REACHED = 0  # a handler, which has no model and gets no body that it could take


def status(
    method: str, headers: dict[str, str], *, address: str | None = "127.0.0.1", path: str = "/tokenize", **settings: Any
) -> int:
    """REACHED, or the status of the refusal of a request that came in at this address of the server."""
    app = create_app(Settings(**settings))
    server = None if address is None else (address, 8000)
    got = anyio.run(lambda: status_of(app, method, path, headers.get("x-api-key"), headers, server))
    return REACHED if got in (400, 404, 503) else got


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8000",
        "localhost.",
        "app.localhost:1",
        "127.0.0.1",
        "127.0.0.1:8000",
        "[::1]:8000",
        "10.0.0.7",
        "host.docker.internal:8000",
        "host.containers.internal",
    ],
)
def test_names_of_this_machine_are_taken(host: str) -> None:
    assert status("GET", {"host": host}, path="/v1/models") == REACHED
    assert status("POST", {"host": host, **JSON, **BODY}) == REACHED


@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.example",
            "evil.example:8000",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "evil.localhost.example",
        ),
        *(
            "",
            "a/127.0.0.1",
            "a@localhost",
            "127.0.0.1/x",
            "[::1",
            "[evil.example]",
            "localhost:8000:x",
            "headrace",
            "evil.internal",
            "host.docker.internal.evil.example",
            "\xe9",
        ),
    ],
)
def test_a_name_that_was_made_to_mean_this_machine_is_refused(host: str) -> None:
    """DNS rebinding: to the browser page and server are one origin, so nothing but the name gives it away."""
    for method, path in (("GET", "/v1/models"), ("GET", "/dashboard"), ("POST", "/tokenize"), ("DELETE", "/nothing")):
        assert status(method, {"host": host, "sec-fetch-site": "same-origin", **JSON}, path=path) == 403
    # Others have another way to be safe, or another to be asked for.
    assert status("GET", {"host": host}, path="/v1/models", address="10.0.0.7") == REACHED
    assert status("GET", {"host": host}, path="/v1/models", address=None) == REACHED
    assert status("GET", {"host": host}, path="/v1/models", host="0.0.0.0") == REACHED
    assert status("GET", {"host": host, "x-api-key": "key"}, path="/v1/models", api_keys=("key",)) == REACHED
    assert status("GET", {"host": host}, path="/v1/models", allowed_hosts=("*",)) == REACHED


@pytest.mark.parametrize("settings", [{}, {"host": "0.0.0.0"}, {"api_keys": ("key",)}], ids=str)
def test_allowed_hosts_hold_on_every_address_once_they_are_set(settings: dict[str, Any]) -> None:
    def get(host: str) -> int:
        headers = {"host": host, "x-api-key": "key"}
        return status(
            "GET", headers, path="/v1/models", address="10.0.0.7", allowed_hosts="LLM.example.com", **settings
        )

    assert [get(host) for host in ("llm.example.com:443", "10.0.0.7:8000", "evil.example")] == [REACHED, REACHED, 403]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, REACHED),  # not a browser
        ({"origin": "http://localhost:8000"}, REACHED),
        ({"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"}, REACHED),
        ({"origin": "http://public.example", "sec-fetch-site": "same-origin"}, REACHED),  # a proxy has changed the host
        ({"sec-fetch-site": "none"}, REACHED),
        ({"sec-fetch-mode": "cors"}, REACHED),  # fetch of Node
        ({"origin": "https://friend.example", "sec-fetch-site": "cross-site"}, REACHED),  # allowed below
        ({"origin": "vscode-webview://abc", "sec-fetch-site": "cross-site"}, REACHED),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://localhost:3000"}, 403),
        ({"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}, 403),
        ({"origin": "https://localhost.evil.example:8000"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "null", "sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "anything-new"}, 403),
        ({"origin": "http://friend.example.evil.example"}, 403),
    ],
    ids=str,
)
def test_a_page_of_another_origin_changes_nothing(headers: dict[str, str], expected: int) -> None:
    given = {"host": "localhost:8000", **JSON, **headers}
    for address in ("127.0.0.1", "10.0.0.7"):
        allowed: dict[str, Any] = {"allowed_hosts": ("friend.example",), "address": address}
        assert status("POST", given, **allowed) == expected
        assert status("DELETE", given, path="/v1/responses/resp_a", **allowed) == expected
        assert status("GET", given, path="/v1/models", **allowed) == REACHED  # which it cannot read
        assert status("POST", {**given, "x-api-key": "key"}, api_keys=("key",), **allowed) == REACHED


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({**BODY, **JSON}, REACHED),
        ({**BODY, "content-type": "Application/JSON; charset=utf-8"}, REACHED),
        ({}, REACHED),  # nothing comes, as of POST /v1/responses/{id}/cancel
        ({"content-length": "0"}, REACHED),
        (BODY, 415),
        ({"transfer-encoding": "chunked"}, 415),
        ({**BODY, "content-type": "text/plain"}, 415),
        ({**BODY, "content-type": "text/plain;application/json"}, 415),
        ({**BODY, "content-type": "application/x-www-form-urlencoded"}, 415),
        ({**BODY, "content-type": "multipart/form-data; boundary=application/json"}, 415),
        ({**BODY, "content-type": ""}, 415),
    ],
    ids=str,
)
def test_a_body_that_needs_no_preflight_is_refused(headers: dict[str, str], expected: int) -> None:
    given = {"host": "localhost", **headers}
    assert status("POST", given) == expected
    assert status("POST", given, address="10.0.0.7", host="10.0.0.7") == REACHED
    assert status("POST", {**given, "x-api-key": "key"}, api_keys=("key",)) == REACHED


def test_on_the_wire_a_page_gets_nothing_and_a_client_is_told_what_to_send(server: Server) -> None:
    before = server.wait_idle().generation_tokens
    body = {"prompt": "a", "max_tokens": 1}
    for headers, expected, word in (
        ({"host": "evil.example"}, 403, "allowed_hosts"),
        ({"origin": "http://evil.example"}, 403, "api_keys"),
        ({"content-type": "text/plain"}, 415, "Content-Type: application/json"),
    ):
        for path in ("/v1/completions", "/v1/messages"):
            answer = server.post(path, body, **headers)
            assert answer.status_code == expected
            assert word in answer.json()["error"]["message"]
            assert "access-control-allow-origin" not in answer.headers
    assert server.client.options("/v1/completions", headers={"origin": "http://evil.example"}).status_code == 405
    assert server.post("/v1/completions", body, origin=server.base_url).status_code == 200
    assert server.wait_idle().generation_tokens == before + 1
