"""Every route, and everything that is not one: status, headers and the envelope of errors."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.harness import MODEL, Server

PROBES = ["/health", "/livez", "/readyz", "/startupz"]


def test_model_list_and_card_tell_what_clients_ask_for(server: Server) -> None:
    listing = server.client.get("/v1/models").json()
    assert listing["object"] == "list"
    [card] = listing["data"]
    assert card["id"] == MODEL
    assert card["object"] == "model"
    assert card["max_model_len"] == 4096
    assert server.client.get(f"/v1/models/{MODEL}").json() == card


@pytest.mark.parametrize("name", ["gpt-4o", "some/model/with/slashes", "a%20b"])
def test_unknown_model_is_404_naming_those_that_are_served(server: Server, name: str) -> None:
    answer = server.client.get(f"/v1/models/{name}")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert MODEL in error["message"]


@pytest.mark.parametrize("path", PROBES)
def test_probes_of_a_ready_server_are_200(server: Server, path: str) -> None:
    assert server.client.get(path).status_code == 200


def test_health_has_no_body_and_startupz_tells_the_phase(server: Server) -> None:
    assert server.client.get("/health").content == b""
    assert server.client.get("/startupz").json()["phase"] == "ready"


def test_metrics_count_requests_and_tokens(server: Server) -> None:
    before = server.wait_idle()
    server.complete("One two three", max_tokens=3, ignore_eos=True)
    after = server.wait_idle()
    assert after.generation_tokens == before.generation_tokens + 3
    assert after.finished == before.finished | {"length": before.finished["length"] + 1}
    assert after.http_requests("/v1/completions", "2xx") == before.http_requests("/v1/completions", "2xx") + 1
    for histogram in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        name = f"vllm:{histogram}_count"
        assert after.samples[name] == before.samples[name] + 1
    gaps = "vllm:inter_token_latency_seconds_count"
    assert after.samples[gaps] == before.samples[gaps] + 2


@pytest.mark.parametrize("path", ["/v1", "/v1/nothing", "/health/", "/V1/models", "/v1/chat/completions/"])
def test_unknown_route_is_404_in_the_envelope(server: Server, path: str) -> None:
    answer = server.client.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/chat/completions", "POST"), ("DELETE", "/v1/models", "GET"), ("POST", "/health", "GET")],
)
def test_wrong_method_is_405_in_the_envelope_and_says_which_is_right(
    server: Server, method: str, path: str, allowed: str
) -> None:
    answer = server.client.request(method, path)
    assert answer.status_code == 405
    assert allowed in answer.headers["allow"]
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_request_id_is_echoed_and_becomes_part_of_the_answers_id(server: Server) -> None:
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, **{"X-Request-Id": "my-id.7"})
    assert answer.headers["x-request-id"] == "my-id.7"
    assert answer.json()["id"] == "cmpl-my-id.7"


@pytest.mark.parametrize("given", ["", "two words", "a" * 200, "<script>"])
def test_request_id_that_could_do_harm_is_replaced(server: Server, given: str) -> None:
    answer = server.client.get("/v1/models", headers={"x-request-id": given})
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] not in ("", given)


def test_two_requests_of_one_id_are_two_requests(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(server.post, "/v1/completions", body, **{"X-Request-Id": "same"}) for _ in range(2)]
    first, second = (each.result().json() for each in both)
    assert first["id"] == second["id"] == "cmpl-same"
    assert first["choices"] == second["choices"]


def test_body_over_the_limit_is_413_announced_or_not(server: Server) -> None:
    limit = 4 * 2**20 + 64 * server.client.get("/v1/models").json()["data"][0]["max_model_len"]
    chunk = b" " * 2**16

    def unannounced() -> Iterator[bytes]:
        for _ in range(limit // len(chunk) + 1):
            yield chunk

    for content in (b" " * (limit + 1), unannounced()):
        answer = server.client.post("/v1/completions", content=content)
        assert answer.status_code == 413
        assert str(limit) in answer.json()["error"]["message"]
    assert server.client.get("/health").status_code == 200


def test_compressed_body_is_415(server: Server) -> None:
    body = gzip.compress(b'{"prompt": "a"}')
    answer = server.client.post("/v1/completions", content=body, headers={"content-encoding": "gzip"})
    assert answer.status_code == 415
    assert "error" in answer.json()


def test_one_connection_serves_many_requests(server: Server) -> None:
    """A refused request must not spoil the connection for the next one."""
    with server.connect() as client:
        asked: list[tuple[dict[str, Any], int]]
        asked = [({"prompt": ""}, 400), ({"prompt": "a", "max_tokens": 1}, 200), ({}, 400)]
        for body, status in asked * 2:
            client.post("/v1/completions", body)
            assert client.read_head().status_code == status
            client.read_body()
            client.next_exchange()


def test_head_of_an_event_stream_has_no_body_and_ends(server: Server) -> None:
    """A byte of it would be the head of the next answer on the connection, which may be another client's of a proxy."""
    with server.connect() as client:
        client.send_bytes(b"HEAD /dashboard/frames HTTP/1.1\r\nhost: localhost\r\n\r\n")
        client.send_bytes(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        first, _, second = client.read_raw().partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert b"text/event-stream" in first
    assert second.startswith(b"HTTP/1.1 200 ")
    assert server.client.head("/dashboard/frames").content == b""


@pytest.mark.parametrize("method", [b"HEAD", b"head", b"hEaD"])
def test_method_in_small_letters_spoils_no_connection(server: Server, method: bytes) -> None:
    """It is taken for the one in capitals, by every layer alike: HEAD has no body, whatever length it tells of."""
    with server.connect() as client:
        client.send_bytes(method + b" /nowhere HTTP/1.1\r\nhost: localhost\r\n\r\n")
        client.send_bytes(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        first, _, second = client.read_raw().partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 404 ")
    assert second.startswith(b"HTTP/1.1 200 ")
