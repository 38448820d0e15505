"""One test for each published hole of a server of this kind below its JSON: heads, bodies and how they come."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator

import pytest

from tests.support.exposed_server import BODY_LIMIT, CHAT, COMPLETIONS, KEY, MIB, assert_well, exposed_server
from tests.support.harness import Server

FLAT = 16 * MIB  # what the process may grow by however much it is sent: an allocator's slack


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with exposed_server() as running:
        yield running


def raw_exchange(server: Server, data: bytes) -> bytes:
    with server.connect() as client:
        client.send_bytes(data)
        return client.read_raw()


def resident(server: Server) -> float:
    return server.metrics().samples["process_resident_memory_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [CHAT, COMPLETIONS, "/v1/models", "/metrics", "/openapi.json", "/dashboard/frames", "/v1/requests/x/timeline"],
)
@pytest.mark.parametrize("host", ["a/?", "a#", "a/health?", "a/livez", "a@b", "[::1]/health"])
def test_cve_2026_48746_and_48710_a_host_header_does_not_steer_authentication(
    server: Server, path: str, host: str
) -> None:
    for target in (path, f"http://a/health?{path}"):
        head = f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
        assert raw_exchange(server, head.encode()).split()[1] in (b"400", b"401")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["BREW", "TRACE", "PROPFIND", "GETS", "X" * 2000])
def test_cve_2026_48817_an_unknown_method_is_405_and_makes_no_series(server: Server, method: str) -> None:
    for path in ("/v1/models", "/health", "/metrics"):
        answer = server.client.request(method, path)
        assert answer.status_code == 405
        assert "GET" in answer.headers["allow"]
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert not [name for name in server.metrics().samples if method in name]


def test_cve_2025_48956_huge_and_countless_headers_are_431_and_cost_no_memory(server: Server) -> None:
    start = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    heads = [
        start + b"x: " + b"a" * MIB + b"\r\n\r\n",
        start + b"a: b\r\n" * 10_000 + b"\r\n",
        start + b"a: b\r\n" * 200_000 + b"\r\n",
        b"GET /" + b"a" * MIB + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ]
    before = resident(server)
    for head in heads * 10:
        try:
            answer = raw_exchange(server, head)
        except ConnectionError:
            continue  # the server had seen enough before everything was sent
        assert answer.split()[1] == b"431"
        assert b'"type":"invalid_request_error"' in answer
    assert resident(server) - before < FLAT < sum(map(len, heads)) * 10


def test_cve_2026_55646_a_body_is_measured_while_it_arrives(server: Server) -> None:
    """Announced or in chunks: the answer comes before the body has, and the body is kept nowhere."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer " + KEY.encode() + b"\r\n"
    answer = raw_exchange(server, head + b"content-length: %d\r\n\r\n" % (BODY_LIMIT + 1))
    assert answer.split()[1] == b"413"

    before = resident(server)
    with server.connect() as client:
        client.send_bytes(head + b"transfer-encoding: chunked\r\n\r\n")
        with pytest.raises(ConnectionError):
            client.send_bytes((b"%x\r\n%b\r\n" % (MIB, b"[" * MIB)) * 100)
        answer = client.read_raw()
    assert answer.split()[1] == b"413"
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"].startswith("The request body is larger")
    assert resident(server) - before < BODY_LIMIT + FLAT


@pytest.mark.parametrize("order", [1, -1])
def test_a_body_with_two_lengths_ends_its_connection(server: Server, order: int) -> None:
    """A proxy that believes the other header than the server would mix up two clients' requests (RFC 9112, 6.1)."""
    lengths = [b"content-length: 3\r\n", b"transfer-encoding: chunked\r\n"][::order]
    head = b"POST /livez HTTP/1.1\r\nhost: localhost\r\n" + b"".join(lengths)
    answer = raw_exchange(server, head + b"\r\n0\r\n\r\n" + b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") == answer.count(b"HTTP/1.1 400") == 1


def test_cve_2026_54233_a_compressed_body_is_not_inflated(server: Server) -> None:
    bomb = gzip.compress(b" " * 256 * MIB, compresslevel=1)
    before = resident(server)
    for path in (CHAT, COMPLETIONS):
        answer = server.client.post(path, content=bomb, headers={"content-encoding": "gzip"})
        assert answer.status_code == 415
        assert server.client.post(path, content=bomb).status_code == 400, "without the header it is no JSON"
    assert resident(server) - before < 2 * len(bomb) + FLAT


@pytest.mark.parametrize("path", [COMPLETIONS, "/nowhere", "/livez"])
def test_an_answer_before_the_end_of_its_request_says_that_the_connection_ends(server: Server, path: str) -> None:
    """Otherwise the client's next request goes into a connection that is being closed."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-encoding: gzip\r\ncontent-length: 1000000\r\n".encode()
    for key in (KEY, "wrong"):
        answer = raw_exchange(server, head + b"authorization: Bearer " + key.encode() + b"\r\n\r\n[")
        status_line, *headers = answer.partition(b"\r\n\r\n")[0].lower().split(b"\r\n")
        assert status_line.split()[1] in (b"401", b"404", b"405", b"415")
        assert b"connection: close" in headers


def test_a_body_that_trickles_for_ever_is_given_up(server: Server) -> None:
    with server.connect() as client:
        client.send_bytes(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer " + KEY.encode())
        client.send_bytes(b"\r\ncontent-length: 1000000\r\n\r\n")
        answer = _trickle_until_answered(client._socket)
    assert answer.split()[1] == b"408"
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_timeout"


def _trickle_until_answered(connection: socket.socket) -> bytes:
    connection.settimeout(0.05)
    received = b""
    for _ in range(2000):
        try:
            chunk = connection.recv(65536)
        except TimeoutError:
            connection.sendall(b"[")
        else:
            received += chunk
            if not chunk:
                return received
    pytest.fail("the server waits for ever")


def test_cve_2024_47874_forms_are_not_parsed(server: Server) -> None:
    form = {"prompt": ("prompt.txt", b"a" * MIB)}
    assert server.client.post(COMPLETIONS, files=form).json()["error"]["code"] == "invalid_json"
    assert server.client.post(COMPLETIONS, data={"prompt": "a"}).json()["error"]["code"] == "invalid_json"


def test_after_all_of_this_the_server_is_well(server: Server) -> None:
    assert_well(server)
