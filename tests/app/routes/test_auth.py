"""With API keys set, nothing but the probes answers without one, whatever the request's shape."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import pytest

from tests.support.harness import MODEL, Server

KEY = "sk-test-0123456789"


@pytest.fixture(scope="module")
def locked_server() -> Iterator[Server]:
    """Not waited for: keys are asked for from the first moment on, model or not."""
    with Server("uvloop", api_keys=f"sk-other,{KEY}", max_num_seqs=4) as running:
        running.poll(lambda: running.get_or_none("/livez"), lambda answer: answer is not None)
        yield running


def test_a_refusal_leaves_a_line_that_says_why_and_from_where(locked_server: Server) -> None:
    """The first test: after twenty refusals, only some are logged."""
    for headers, code in (({}, "missing_api_key"), ({"x-api-key": "sk-guess"}, "invalid_api_key")):
        path = f"/nothing/{code}"
        message = locked_server.client.get(path, headers=headers).json()["error"]["message"]
        assert ("mistyped" in message) == (code == "invalid_api_key")
        [line] = [json.loads(line) for line in locked_server.log.splitlines() if path in line]
        assert {"status": 401, "error": code, "client": "127.0.0.1", "method": "GET"}.items() <= line.items()
    assert "sk-guess" not in locked_server.log


@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz", "/startupz"])
def test_probes_need_no_key(locked_server: Server, path: str) -> None:
    assert locked_server.client.get(path).status_code in (200, 503)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/resp_1"),
        ("GET", "/v1/models"),
        ("GET", f"/v1/models/{MODEL}"),
        ("GET", "/metrics"),
        ("GET", "/nothing/here"),
        ("DELETE", "/v1/models"),
        ("OPTIONS", "/v1/models"),
        ("GET", "/health/../v1/models"),
        ("GET", "/health%2f..%2fv1/models"),
        ("GET", "/%2fhealth"),
        ("GET", "/v1/models?/health"),
    ],
)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer"},
        {"authorization": f"Basic {KEY}"},
        {"authorization": KEY},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"x-api-key": ""},
        {"x-api-key": "wrong"},
    ],
    ids=str,
)
def test_every_other_route_is_401_without_a_right_key(
    locked_server: Server, method: str, path: str, headers: dict[str, str]
) -> None:
    answer = locked_server.client.request(method, path, headers=headers)
    assert answer.status_code == 401
    error = answer.json()["error"]
    assert error["type"] == "authentication_error"
    sent_one = any("Bearer " in value or (name == "x-api-key" and value) for name, value in headers.items())
    assert error["code"] == ("invalid_api_key" if sent_one else "missing_api_key")
    assert KEY not in answer.text


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages?beta=true", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("headers", [{}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}], ids=str)
def test_without_a_right_key_anthropics_routes_answer_in_its_envelope(
    locked_server: Server, path: str, headers: dict[str, str]
) -> None:
    answer = locked_server.client.post(path, json={}, headers=headers)
    assert answer.status_code == 401
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")
    assert KEY not in answer.text


@pytest.mark.parametrize("host", ["a/health?", "a/health#", "a/?", "a#", "127.0.0.1/livez", "\u00e9"])
def test_a_hostile_host_header_opens_nothing(locked_server: Server, host: str) -> None:
    """A framework that rebuilds the URL from the Host header sees another path than the router does."""
    with locked_server.connect() as client:
        client.send_bytes(b"GET /metrics HTTP/1.1\r\nconnection: close\r\nhost: " + host.encode() + b"\r\n\r\n")
        answer = client.read_raw()
    assert answer.split()[1] in (b"400", b"401")
    assert b"vllm:" not in answer


@pytest.mark.parametrize("target", ["http://a/health", "http://a/livez?x", "/v1/models#/health", "*", "a:80"])
def test_a_hostile_target_opens_nothing(locked_server: Server, target: str) -> None:
    with locked_server.connect() as client:
        client.send_bytes(f"GET {target} HTTP/1.1\r\nconnection: close\r\nhost: localhost\r\n\r\n".encode())
        answer = client.read_raw()
    assert answer.split()[1] in (b"400", b"401")


def test_a_key_in_either_header_opens_the_door(locked_server: Server) -> None:
    locked_server.wait_ready()
    for headers in ({"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer {KEY}"}, {"x-api-key": KEY}):
        assert locked_server.client.get("/v1/models", headers=headers).status_code == 200
    body = {"prompt": "a", "max_tokens": 1}
    assert locked_server.post("/v1/completions", body, **{"x-api-key": "sk-other"}).status_code == 200


def test_clients_of_different_keys_share_no_prefix_cache(locked_server: Server) -> None:
    """Whether a prompt was seen before is another tenant's secret."""
    locked_server.wait_ready()
    body = {"prompt": "A secret that is long enough to fill a block of the cache. " * 4, "max_tokens": 1}

    def cached(key: str) -> int:
        answer = locked_server.post("/v1/completions", body, **{"x-api-key": key})
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(KEY) == 0
    assert cached(KEY) > 0
    assert cached("sk-other") == 0


def test_metrics_name_the_tenant_of_a_key_by_nothing_that_a_guess_could_be_tried_on(locked_server: Server) -> None:
    locked_server.wait_ready()
    text = locked_server.client.get("/metrics", headers={"x-api-key": KEY}).text
    assert text.count("headrace:tenant_waiting{") == 2
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    assert digest[:16] not in text
    assert hashlib.sha256(digest[:16].encode()).hexdigest()[:16] not in text


def test_keys_are_never_logged(locked_server: Server) -> None:
    assert locked_server.client.get("/v1/models", headers={"x-api-key": KEY}).status_code in (200, 503)
    assert KEY not in locked_server.log
