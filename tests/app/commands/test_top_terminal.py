"""`headrace top` beside a real server: live in a terminal, once in a pipe, with and without an admin key."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Event

import httpx
import pytest

from tests.support.harness import REPOSITORY, TIMEOUT, Server
from tests.support.terminal import ESCAPES, Terminal
from tests.support.tiny_model import tiny_server

WORK = {"prompt": "A headrace", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}
CLIENT = {"authorization": "Bearer client"}
KEYS = {"HEADRACE_API_KEYS": "client", "HEADRACE_ADMIN_KEYS": "admin"}


@pytest.fixture
def watched() -> Iterator[Server]:
    with tiny_server(api_keys="client", admin_keys="admin") as running:
        yield running.wait_ready()


def once(url: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app.commands.cli", "top", "--url", url, "--interval", "0.2"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | environment,
        timeout=TIMEOUT,
        check=False,
    )


@contextmanager
def working(server: Server) -> Iterator[None]:
    """One request after the other, until the block is left."""
    stopped = Event()

    def work() -> None:
        with suppress(httpx.TransportError):  # it is killed in the end
            while not stopped.is_set():
                server.client.post("/v1/completions", json=WORK, headers=CLIENT)

    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(work)
        try:
            yield
        finally:
            stopped.set()
            done.result()


@pytest.mark.slow
def test_a_server_is_watched_while_it_works_goes_and_comes_back(watched: Server) -> None:
    arguments = ("top", "--url", watched.base_url, "--interval", "0.2")
    with Terminal(*arguments, environment=KEYS) as terminal, working(watched):
        for shown in ("1 running, 0 waiting", " ms each", "decode"):
            terminal.wait_for(shown)
        terminal.resize(20, 60)
        terminal.wait_for("decode")

        # In a pipe it is one look, with rates, and no escape sequences.
        done = once(watched.base_url, **KEYS)
        assert done.returncode == 0, done.stderr
        assert "1 running" in done.stdout
        assert "decode" in done.stdout
        assert "owned" in done.stdout
        assert not re.search(r"(?<!\d)0\.0 generated/s", done.stdout)
        assert not ESCAPES.search(done.stdout)

        # Who has no admin key sees figures.
        done = once(watched.base_url, HEADRACE_API_KEYS="client")
        assert "1 running" in done.stdout
        assert "HEADRACE_ADMIN_KEYS" in done.stdout
        assert "decode" not in done.stdout

        watched.kill()
        terminal.wait_for("No answer from")
        again = tiny_server(api_keys="client", admin_keys="admin")
        again.port = watched.port
        again.base_url = watched.base_url
        with again:
            terminal.wait_for("0 running, 0 waiting")
            terminal.wait_for("owned")
            terminal.type("q")
            assert terminal.wait_exit() == 0
    assert "Traceback" not in terminal.shown


@pytest.mark.slow
def test_sigterm_gives_the_terminal_back(watched: Server) -> None:
    with Terminal("top", "--url", watched.base_url, "--interval", "0.2", environment=KEYS) as terminal:
        terminal.wait_for("0 running")
        terminal.process.terminate()
        with pytest.raises(AssertionError, match="it ended"):
            terminal.wait_for("this never comes")
        assert terminal.wait_exit() == 143
    assert terminal.shown.rindex("\x1b[?1049l") > terminal.shown.rindex("\x1b[?1049h")


def test_whom_nobody_answers_is_told() -> None:
    done = once("http://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: No answer from http://127.0.0.1:9")


@pytest.mark.slow
def test_without_any_keys_requests_are_shown_and_an_abort_says_what_it_needs() -> None:
    with (
        tiny_server() as server,
        Terminal("top", "--url", server.wait_ready().base_url, "--interval", "0.2", rows=40, columns=130) as terminal,
        working(server),
    ):
        terminal.wait_for(r"tiny · Headrace .* 16 slots")
        terminal.wait_for(r"[▁█]+ +1 running")
        terminal.wait_for("decode")
        terminal.type("s")
        terminal.wait_for(r"sort \(tenant\)")
        while "abort" in terminal.wait_for(r"\? y: yes|a abort"):  # until a request is there to be selected
            terminal.type("\x1b[Ba")
        terminal.type("y")
        terminal.wait_for("HEADRACE_ADMIN_KEYS")
        terminal.type("q")
        assert terminal.wait_exit() == 0


@pytest.mark.slow
def test_an_administrator_aborts_the_selected_request_after_a_question(watched: Server) -> None:
    body = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with (
        Terminal("top", "--url", watched.base_url, "--interval", "0.2", columns=130, environment=KEYS) as terminal,
        watched.client.stream("POST", "/v1/completions", json=body, headers=CLIENT) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        terminal.wait_for("cmpl-.*decode")
        terminal.type("\x1b[B")
        terminal.type("a")
        terminal.wait_for(r"Abort cmpl-\S+\? y: yes, any other key: no")
        terminal.type("y")
        terminal.wait_for(r"cmpl-\S+: aborted")
        assert '"finish_reason":"abort"' in "".join(lines)
        terminal.wait_for("0 running, 0 waiting")
        terminal.type("q")
        assert terminal.wait_exit() == 0
