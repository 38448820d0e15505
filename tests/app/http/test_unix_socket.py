"""A server at a Unix socket: its permissions, streams through it, and which sockets it replaces."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from app.config.settings import Settings, SettingsError
from app.serving.process import bind
from tests.selection import slow_except
from tests.support.harness import TIMEOUT
from tests.support.raw_client import sse_events
from tests.support.serve_command import ServeCommand, unix_client

BODY: dict[str, Any] = {"prompt": "Hi", "max_tokens": 40, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module", params=slow_except(["uvloop", "asyncio", "trio"], "uvloop"))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, ServeCommand]]:
    path = tmp_path_factory.mktemp("uds") / "headrace.sock"
    with ServeCommand(request.param, client=unix_client(path), uds=path) as server:
        yield path, server.wait_ready()
        assert "Traceback" not in server.log, server.log


@pytest.mark.slow
def test_answers_and_streams_come_through_it(served: tuple[Path, ServeCommand]) -> None:
    _, server = served
    whole = server.complete(**BODY)["choices"][0]["text"]
    with server.client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
        *chunks, done = sse_events(answer.iter_bytes())
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole


def test_its_permissions_are_0660_and_no_port_is_open(served: tuple[Path, ServeCommand]) -> None:
    path, server = served
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))


def test_a_client_that_leaves_frees_its_request(served: tuple[Path, ServeCommand]) -> None:
    _, server = served
    before = server.wait_idle().aborted
    with server.client.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 4000, "stream": True}) as answer:
        next(answer.iter_bytes())
    assert server.wait_idle().aborted == before + 1


def test_a_second_server_at_a_live_socket_is_refused(served: tuple[Path, ServeCommand]) -> None:
    path, server = served
    with ServeCommand(uds=path) as second:
        assert second.wait_exit() == 1
        assert second.log.startswith(f"error: uds: cannot listen on {path}: a server listens there")
    assert server.client.get("/livez").status_code == 200


def test_a_socket_of_a_killed_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "headrace.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    inode = path.stat().st_ino
    with bind(Settings(uds=path, uds_mode="0600")) as listener, socket.socket(socket.AF_UNIX) as client:
        client.settimeout(TIMEOUT)
        client.connect(str(path))
        assert listener.accept()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.stat().st_ino != inode or path.is_socket()
        with pytest.raises(SettingsError, match="a server listens there"):
            bind(Settings(uds=path))
    bind(Settings(uds=path)).close()
    umask = os.umask(0o077)
    try:
        bind(Settings(uds=path)).close()
        assert stat.S_IMODE(path.stat().st_mode) == 0o660, "the process's umask has no say"
        assert os.umask(0o077) == 0o077, "and is as it was"
    finally:
        os.umask(umask)


def test_only_one_of_several_servers_replaces_a_stale_socket(tmp_path: Path) -> None:
    def won(path: Path, everyone: Barrier) -> bool:
        everyone.wait(TIMEOUT)
        try:
            listeners.append(bind(Settings(uds=path)))
        except SettingsError:
            return False
        return True

    listeners: list[socket.socket] = []
    with ThreadPoolExecutor(8) as threads:
        for number in range(60):
            bind(Settings(uds=(path := tmp_path / f"{number}.sock"))).close()
            starts = [threads.submit(won, path, everyone) for everyone in [Barrier(8)] for _ in range(8)]
            assert sum(start.result(TIMEOUT) for start in starts) == 1
    for listener in listeners:
        listener.close()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(SettingsError, match="uds: cannot listen on .*notes.txt: the file there is no socket"):
        bind(Settings(uds=path))
    assert path.read_text() == "mine"
    for wrong in (tmp_path / "nowhere" / "a.sock", tmp_path / ("a" * 120)):
        with pytest.raises(SettingsError, match="uds: cannot listen on .*What works: a new path of at most 107 bytes"):
            bind(Settings(uds=wrong))


@pytest.mark.slow
def test_hypercorns_own_unix_socket_serves_the_application(tmp_path: Path) -> None:
    path = tmp_path / "hypercorn.sock"
    with ServeCommand(hypercorn=["--bind", f"unix:{path}"], client=unix_client(path)) as server:
        server.wait_ready()
        assert server.complete(**BODY)["usage"]["completion_tokens"] == 40
