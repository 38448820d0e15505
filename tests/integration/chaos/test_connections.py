"""No connection outlives its limits, whatever its client does with it, and a full server has room for the next."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import h11
import orjson
import pytest

from tests.integration.chaos.harness import ChaosServer
from tests.support.harness import TIMEOUT

IDLE_TIMEOUT = 1  # seconds; a whole number, because Hypercorn's flag takes no other
SEND_TIMEOUT = 1.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

EVERY_LOOP = pytest.mark.parametrize("server", ["uvloop", "asyncio", "trio"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[ChaosServer]:
    flags = ("--keep-alive", str(IDLE_TIMEOUT))
    settings = {"send_timeout": SEND_TIMEOUT, "body_timeout": 1.0, "api_keys": "a-key"}
    with ChaosServer(request.param, "hypercorn.toml", device="simulated", flags=flags, **settings) as running:
        running.client.headers["authorization"] = "Bearer a-key"
        yield running.wait_ready()
        assert "Traceback" not in running.log, running.log


def request_head(more: bytes = b"") -> bytes:
    return b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\n" + more


# What is sent first, and what again and again afterwards.
NEVER_A_REQUEST: dict[str, tuple[bytes, bytes]] = {
    "nothing": (b"", b""),
    "part of a line": (b"GET /li", b""),
    "part of the headers": (request_head(b"x-a: b"), b""),
    "trickled headers": (request_head(), b"x-a: b\r\n"),
    "preface": (PREFACE, b""),
    "failed websocket": (request_head(b"connection: upgrade\r\nupgrade: websocket\r\n\r\n"), b""),
    "declined h2c": (request_head(b"connection: upgrade\r\nupgrade: h2c\r\nhttp2-settings: ?\r\n\r\n"), b""),
    "no http": (b"\x00\x01\x02\r\n\r\n", b""),
    "too long a head": (request_head(b"x: " + b"a" * 70_000), b""),
}


def wait_closed(connections: dict[str, socket.socket], again: dict[str, bytes]) -> None:
    """Read all that comes until each has been closed."""
    deadline = time.monotonic() + TIMEOUT
    still_open = dict(connections)
    while still_open:
        assert time.monotonic() < deadline, f"still open: {list(still_open)}"
        for name, connection in list(still_open.items()):
            try:
                connection.sendall(again[name])
                while chunk := connection.recv(65536, socket.MSG_DONTWAIT):
                    assert chunk
            except BlockingIOError:
                continue
            except ConnectionError:
                pass
            del still_open[name]
        time.sleep(0.05)
    for connection in connections.values():
        connection.close()


@EVERY_LOOP
def test_connection_without_a_request_is_closed_whatever_comes_in_on_it(server: ChaosServer) -> None:
    before = server.num_open_files
    connections = {}
    for name, (first, _) in NEVER_A_REQUEST.items():
        connections[name] = socket.create_connection(("127.0.0.1", server.port))
        connections[name].sendall(first)
    wait_closed(connections, {name: again for name, (_, again) in NEVER_A_REQUEST.items()})
    server.poll(lambda: server.num_open_files, lambda now: now <= before)


@EVERY_LOOP
def test_http2_is_refused_in_words_and_never_taken_up(server: ChaosServer) -> None:
    upgrade = b"host: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\nhttp2-settings: A\r\n\r\n"
    for line in (b"PRI /livez HTTP/1.1", b"PRI * HTTP/1.1"):
        with server.connect() as client:
            client.send_bytes(line + b"\r\n" + upgrade)
            assert client.read_head().status_code in {401, 404, 405}
    with server.connect() as client:
        client.send_bytes(PREFACE)
        head = client.read_head()
        assert head.status_code == 505
        assert (b"connection", b"close") in head.headers
        assert b"Use HTTP/1.1" in client.read_body()


@EVERY_LOOP
def test_line_break_after_the_last_request_does_not_cost_its_answer(server: ChaosServer) -> None:
    for request in (
        b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
        b"GET /livez HTTP/1.0\r\n\r\n",
    ):
        with server.connect() as client:
            client.send_bytes(request + b"\r\n")
            assert client.read_head().status_code == 200


@EVERY_LOOP
def test_malformed_chunk_leaves_no_traceback(server: ChaosServer) -> None:
    for _ in range(20):
        with server.connect() as client:
            client.send_bytes(b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n")
            with suppress(ConnectionError):
                client.read_raw()
    assert "Traceback" not in server.log, server.log


REFUSED: dict[str, bytes] = {
    "unknown path": b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer a-key\r\n\r\n",
    "wrong method": b"PUT /livez HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "no key": b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "too many headers": b"GET /livez HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 150 + b"\r\n",
}


@EVERY_LOOP
@pytest.mark.parametrize("kind", REFUSED)
def test_refusals_that_nobody_reads_are_cut(server: ChaosServer, kind: str) -> None:
    """Asked for again and again in one go, until the answers fill everything between server and client."""
    before = server.num_open_files
    with server.connect(receive_buffer=4096) as client:
        try:
            while True:  # ends with the connection, or fails by the client's own timeout
                client.send_bytes(REFUSED[kind] * 50)
        except ConnectionError:
            pass
        server.poll(lambda: server.num_open_files, lambda now: now <= before)


@pytest.mark.parametrize("worker_class", ["uvloop", "asyncio", "trio"])
def test_unread_answers_do_not_hold_up_the_end(worker_class: str) -> None:
    with ChaosServer(worker_class, "hypercorn.toml", device="simulated") as server:
        server.wait_ready()
        with server.connect(receive_buffer=4096) as client:
            client.be_patient_for(0.5)
            with suppress(TimeoutError):
                while True:
                    client.send_bytes(REFUSED["unknown path"] * 50)
            assert server.stop() == 0


# --- a full server

CONNECTIONS = 4  # connections
FULL: dict[str, Any] = {"max_connections": CONNECTIONS, "max_num_seqs": 2 * CONNECTIONS, "send_timeout": 60}


@pytest.fixture(scope="module")
def small_server(request: pytest.FixtureRequest) -> Iterator[ChaosServer]:
    with ChaosServer(request.param, "hypercorn.toml", device="simulated", **FULL) as running:
        yield running.wait_ready()
        assert "Traceback" not in running.log, running.log


SMALL_ON_EVERY_LOOP = pytest.mark.parametrize(
    "small_server", ["uvloop", "asyncio", "trio"], indirect=True, scope="module"
)


@SMALL_ON_EVERY_LOOP
def test_newcomer_takes_the_place_of_the_one_idle_for_longest(small_server: ChaosServer) -> None:
    server = small_server
    server.client.close()
    clients = [server.connect() for _ in range(CONNECTIONS)]
    for client in reversed(clients):  # the last to open is the one idle for longest
        client.get("/livez")
        assert client.read_head().status_code == 200
        client.read_body()
        client.next_exchange()
    streamed = server.stream("served", max_tokens=1000)  # takes the place of the last
    streamed.read_some()
    with server.connect() as newcomer:
        newcomer.get("/livez")
        assert newcomer.read_head().status_code == 200
    assert clients[3].read_raw() == clients[2].read_raw() == b""
    for client in clients[:2]:
        client.get("/livez")
        assert client.read_head().status_code == 200
    assert streamed.read().done


@SMALL_ON_EVERY_LOOP
def test_crowd_from_one_address_takes_its_own_places(small_server: ChaosServer) -> None:
    server = small_server
    server.client.close()
    question = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), TIMEOUT, ("127.0.0.2", 0)) as alone:
        for _ in range(2):
            alone.sendall(question)
            answer = alone.recv(65536)
            while answer and not answer.endswith(b"}"):
                answer += alone.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200")
            for _ in range(2 * CONNECTIONS):  # each of which is younger
                server.poll(lambda: ask_once(server), lambda status: status == 200)
            crowd = [server.connect() for _ in range(2 * CONNECTIONS)]
            for client in crowd:
                client.leave_with_rst()


@SMALL_ON_EVERY_LOOP
def test_newcomer_is_refused_in_words_when_all_are_being_served(small_server: ChaosServer) -> None:
    server = small_server
    server.client.close()
    with server.faults.during("slow", seconds=0.05):
        streams = [server.stream(f"full-{number}", max_tokens=1000).read_some() for number in range(CONNECTIONS)]
        with server.connect() as newcomer:
            newcomer.get("/livez")
            head = newcomer.read_head()
            assert head.status_code == 503
            assert {(b"connection", b"close"), (b"retry-after", b"5")} <= set(head.headers)
            assert orjson.loads(newcomer.read_body())["error"]["code"] == "too_many_connections"
        streams[0].close()
        server.poll(lambda: ask_once(server), lambda status: status == 200)
        for stream in streams[1:]:
            stream.close()


@SMALL_ON_EVERY_LOOP
def test_newcomer_takes_the_place_of_a_request_that_waits_for_its_client(small_server: ChaosServer) -> None:
    server = small_server
    server.client.close()
    upload = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{"
    uploads = [server.connect() for _ in range(CONNECTIONS)]
    for client in uploads:
        client.send_bytes(upload)

    # Until the uploads have taken long enough, it is refused.
    server.poll(lambda: ask_once(server), lambda status: status == 200)
    for client in uploads:
        client.leave_with_rst()


@SMALL_ON_EVERY_LOOP
def test_answers_left_unread_after_the_last_request_do_not_keep_a_place(small_server: ChaosServer) -> None:
    """They wait in the transport, on connections that count as idle and are never closed in order."""
    server = small_server
    server.client.close()
    jams = [server.connect(receive_buffer=2304) for _ in range(3 * CONNECTIONS)]
    for client in jams:
        with suppress(ConnectionError):
            client.send_bytes(REFUSED["unknown path"] * 700)
    server.poll(lambda: ask_once(server), lambda status: status == 200)
    for client in jams:
        client.leave_with_rst()


@pytest.mark.parametrize("worker_class", ["uvloop", "trio"])
def test_one_address_takes_no_more_than_its_share(worker_class: str) -> None:
    with ChaosServer(
        worker_class, "hypercorn.toml", device="simulated", max_connections_per_address=2, max_num_seqs=8
    ) as server:
        server.wait_ready()
        server.client.close()
        with server.faults.during("slow", seconds=0.05):
            streams = [server.stream(f"mine-{number}", max_tokens=300).read_some() for number in range(2)]
            with server.connect() as newcomer:
                newcomer.get("/livez")
                assert newcomer.read_head().status_code == 429
                assert orjson.loads(newcomer.read_body())["error"]["code"] == "too_many_connections"
            with socket.create_connection(("127.0.0.1", server.port), TIMEOUT, ("127.0.0.2", 0)) as other:
                other.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                assert other.recv(65536).startswith(b"HTTP/1.1 200")
        for stream in streams:
            assert stream.read().done


# --- a process that may open few files

FEW_FILES = 100


@pytest.mark.parametrize("worker_class", ["asyncio"])
def test_flood_of_connections_does_not_keep_anybody_from_being_served(worker_class: str) -> None:
    check_flood(worker_class, rounds=1)


@pytest.mark.storm
@pytest.mark.parametrize("worker_class", ["uvloop", "asyncio", "trio"])
def test_long_flood_of_connections_does_not_keep_anybody_from_being_served(worker_class: str) -> None:
    check_flood(worker_class, rounds=20)


def check_flood(worker_class: str, rounds: int) -> None:
    """Open twice as many unfinished connections of every kind as the process may open files. One client is still
    served; it keeps reading, because a full server first drops clients that do not read their answers.
    """
    server = ChaosServer(worker_class, "hypercorn.toml", device="simulated", body_timeout=5, send_timeout=5)
    server.max_open_files = FEW_FILES
    kinds = [first for first, _ in NEVER_A_REQUEST.values()]
    kinds += [
        REFUSED["unknown path"],
        REFUSED["unknown path"] * 300,
        b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n",
    ]
    with server, ThreadPoolExecutor(1) as reader:
        server.wait_ready()
        served = reader.submit(server.stream("served", max_tokens=2000).read_some().read)
        before = server.num_open_files
        flood: list[socket.socket] = []
        for number in range(rounds * 2 * FEW_FILES):
            flood.append(socket.create_connection(("127.0.0.1", server.port), TIMEOUT))
            with suppress(ConnectionError):
                flood[-1].sendall(kinds[number % len(kinds)])
            if number % 20 == 0:
                # Hung up on or refused it may be, when more came at once than can be sorted out; then it comes again.
                server.poll(lambda: ask_once(server), lambda status: status == 200)
            if len(flood) > 2 * FEW_FILES:
                flood.pop(0).close()
        assert served.result().done
        for connection in flood:
            connection.close()
        server.poll(lambda: server.num_open_files, lambda now: now <= before)
        assert ask_once(server) == 200
        assert server.stop() == 0
        assert "Traceback" not in server.log, server.log


def ask_once(server: ChaosServer) -> int | None:
    try:
        with server.connect() as client:
            client.get("/livez")
            return client.read_head().status_code
    except (ConnectionError, AssertionError, h11.RemoteProtocolError):
        return None
