"""What Hypercorn does in our hands: real processes, real sockets, each event loop."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.config.settings import Settings
from app.serving.process import hypercorn_config
from tests.selection import slow_except

pytestmark = pytest.mark.seconds

# A server whose answer takes a moment, under the runner that `headrace serve` uses. The drain limit is beyond what a
# test may take, so whoever waits for it instead of for the clients never ends.
SERVER = """
import sys
import anyio
from app.observability.logs import configure_logging, log_ready
from app.serving.process import bind, run
from app.config.settings import Settings

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for piece in (b"one ", b"two ", b"three"):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        await anyio.sleep(0.2)
    await send({"type": "http.response.body", "body": b""})

settings = Settings(port=0, worker_class=sys.argv[1], log_format="json", drain_timeout=1000)
configure_logging(settings)
log_ready(0)
listener = bind(settings)
print(listener.getsockname()[1], flush=True)
run(app, settings, listener)
print("drained", flush=True)
"""
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
END_OF_ANSWER = b"0\r\n\r\n"


@dataclass
class Server:
    process: subprocess.Popen[str]
    port: int

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port))

    def num_open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def ends_well(self) -> bool:
        assert self.process.stdout is not None
        return self.process.wait() == 0 and self.process.stdout.read() == "drained\n"


@pytest.fixture(params=slow_except(["asyncio", "uvloop", "trio"], "uvloop", "trio"))
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, request.param], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            port = int(process.stdout.readline())
            assert "Ready after" in process.stderr.readline()
            assert "Listening at http://127.0.0.1" in process.stderr.readline()
            yield Server(process, port)
        finally:
            process.kill()


def receive_until(client: socket.socket, end: bytes) -> bytes:
    received = b""
    while end not in received:
        piece = client.recv(65536)
        assert piece, f"cut off after {received!r}"
        received += piece
    return received


def test_an_answer_under_way_is_finished_after_sigterm_and_the_exit_code_is_0(server: Server) -> None:
    with server.connect() as idle, server.connect() as client:
        client.sendall(REQUEST)
        answer = receive_until(client, b"one")
        server.process.send_signal(signal.SIGTERM)
        answer += receive_until(client, END_OF_ANSWER)
        assert b"three" in answer
        assert b"server:" not in answer.lower()
        assert idle.recv(1) == b"", "a connection without a request does not hold up the end"
        assert server.ends_well()


def test_a_connection_ends_with_its_client(server: Server) -> None:
    """And not with the keep-alive timer, more than a minute later: sockets would run out."""
    before = server.num_open_files()
    served, aborted = [server.connect() for _ in range(10)], [server.connect() for _ in range(10)]
    for client in served + aborted:
        client.sendall(REQUEST)
    for client in served:
        receive_until(client, END_OF_ANSWER)
    for client in served + aborted:
        client.close()
    give_up = time.monotonic() + 60
    while server.num_open_files() > before and time.monotonic() < give_up:
        time.sleep(0.05)
    assert server.num_open_files() <= before


def test_a_connection_serves_one_request_after_another(server: Server) -> None:
    with server.connect() as client:
        for _ in range(3):
            client.sendall(REQUEST)
            assert b"200" in receive_until(client, END_OF_ANSWER)


def test_the_configuration_for_hypercorn_itself_is_the_same() -> None:
    shipped = tomllib.loads((Path(__file__).parents[3] / "deploy" / "hypercorn.toml").read_text())
    config = hypercorn_config(Settings(), socket.socket())
    others = shipped.keys() - {"bind", "errorlog", "worker_class", "workers"}  # settings, and what the command is
    assert {name: getattr(config, name) for name in others} == {name: shipped[name] for name in others}
    os.close(int(config.bind[0].removeprefix("fd://")))


INHERITING = """
import os, sys
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
os.dup2(int(sys.argv.pop()), 3)
from app.commands.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("kind", [None, socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_what_is_inherited_and_no_socket_that_listens_is_refused(kind: socket.SocketKind | None) -> None:
    with open(os.devnull) if kind is None else socket.socket(type=kind) as inherited:
        number = inherited.fileno()
        command = [sys.executable, "-c", INHERITING, "serve", str(number)]
        ended = subprocess.run(command, pass_fds=[number], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("error: LISTEN_FDS: descriptor 3 is not a listening socket")
