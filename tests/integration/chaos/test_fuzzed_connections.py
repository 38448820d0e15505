"""Valid exchanges of HTTP/1.1, and the preface of HTTP/2, broken at random: the server answers others as before,
logs no failure of its own, and closes every connection, those too that their clients leave open."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from tests.integration.chaos.harness import ChaosServer
from tests.support.harness import TIMEOUT
from tests.support.raw_client import NO_LINGER

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
COMPLETION = b'{"prompt": "a", "max_tokens": 5, "stream": true}'
CLIENTS = 6  # at once
LEFT_OPEN = 25  # of the last ones


def http1(method: str, path: str, body: bytes = b"", *more: str) -> bytes:
    head = [f"{method} {path} HTTP/1.1", "host: localhost", *more]
    if body and not more:
        head.append(f"content-length: {len(body)}")
    return "\r\n".join([*head, "", ""]).encode() + body


CHUNKED = b"%x\r\n%b\r\n0\r\ntrailer: a\r\n\r\n" % (len(COMPLETION), COMPLETION)
HTTP1 = [
    http1("GET", "/livez"),
    http1("GET", "/livez") * 5,
    http1("HEAD", "/nowhere?a=%ff"),
    http1("OPTIONS", "*"),
    http1("CONNECT", "a:443"),
    http1("POST", "/v1/completions", COMPLETION),
    http1("POST", "/v1/completions", CHUNKED, "transfer-encoding: chunked"),
    http1("POST", "/v1/completions", COMPLETION, f"content-length: {len(COMPLETION)}", "expect: 100-continue"),
    http1("POST", "/v1/completions", COMPLETION, "content-length: 5", "content-length: 7"),
    http1(
        "GET", "/livez", b"", "connection: upgrade, http2-settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__"
    ),
    http1(
        "GET",
        "/",
        b"",
        "connection: upgrade",
        "upgrade: websocket",
        "sec-websocket-version: 13",
        "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
    )
    + b"\x81\x05hello",
    PREFACE,
]


def break_bytes(data: bytes, generator: random.Random) -> bytes:
    start = generator.randrange(len(data) + 1)
    end = min(len(data), start + generator.randrange(1, 20))
    replacements: list[Callable[[], bytes]] = [
        lambda: b"",
        lambda: generator.randbytes(end - start),
        lambda: data[start:end] * 2,
        lambda: generator.choice([b"\r\n", b"\x00", b"\xff", b":", b" ", b"\r\n\r\n", b"9" * 30]),
        data[start:end].swapcase,
    ]
    return data[:start] + generator.choice(replacements)() + data[end:]


def exchange(generator: random.Random) -> bytes:
    """What one client sends: as it should be, or broken."""
    data = b"".join(generator.choices(HTTP1, k=generator.randrange(1, 3)))
    for _ in range(generator.choice([0, 1, 1, 2, 5])):
        data = break_bytes(data, generator)
    return data


def converse(server: ChaosServer, generator: random.Random) -> socket.socket:
    """Send an exchange in some pieces, read or not. The connection stays open."""
    client = socket.create_connection(("127.0.0.1", server.port), TIMEOUT)
    data = exchange(generator)
    cut = generator.choice([len(data), generator.randrange(len(data) + 1)])
    with suppress(OSError):
        client.sendall(data[:cut])
        if generator.random() < 0.5:
            client.settimeout(0.02)
            with suppress(TimeoutError):
                client.recv(65536)
            client.settimeout(TIMEOUT)
        client.sendall(data[cut:])
        if generator.random() < 0.1:
            client.shutdown(socket.SHUT_WR)
    return client


def leave(client: socket.socket, generator: random.Random) -> None:
    if generator.random() < 0.5:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    client.close()


@pytest.mark.parametrize("worker_class", ["uvloop"])
def test_broken_requests_break_nothing(worker_class: str) -> None:
    check_fuzz(worker_class, exchanges=400)


@pytest.mark.storm
@pytest.mark.parametrize("worker_class", ["uvloop", "asyncio", "trio"])
def test_tens_of_thousands_of_broken_requests_break_nothing(worker_class: str) -> None:
    check_fuzz(worker_class, exchanges=20_000)


def check_fuzz(worker_class: str, exchanges: int) -> None:
    seed = int(os.environ.get("STORM_SEED", "20261122"))
    settings = {"body_timeout": 1, "send_timeout": 1, "log_requests": False}
    flags = ("--keep-alive", "1")
    with ChaosServer(worker_class, "hypercorn.toml", device="simulated", flags=flags, **settings) as server:
        server.wait_ready()
        text = server.text_alone("before", 20)
        connected = server.num_open_files
        server.client.close()
        before = server.poll(lambda: server.num_open_files, lambda now: now < connected)

        def one(number: int) -> None:
            generator = random.Random(seed * 1_000_003 + number)
            leave(converse(server, generator), generator)

        with ThreadPoolExecutor(CLIENTS) as pool:
            for _ in pool.map(one, range(exchanges)):
                pass
        left_open = [converse(server, random.Random(seed - number)) for number in range(LEFT_OPEN)]
        server.poll(lambda: server.num_open_files, lambda now: now <= before)
        for left in left_open:
            left.close()
        with server.connect() as client:
            client.get("/livez")
            assert client.read_head().status_code == 200
        print(f"{exchanges} exchanges, seed {seed}, {server.num_open_files - before} more descriptors: {text!r}")
        assert server.stop() == 0
        assert "Traceback" not in server.log, server.log
