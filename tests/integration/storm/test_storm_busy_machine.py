"""A server on all cores beside processes that never let go of theirs: it stays alive, and says what it says alone."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.app.routes.test_tools import NAMED, QUESTION, WEATHER
from tests.support.harness import Server

CLIENTS = 6
CALL: dict[str, Any] = {"messages": QUESTION, "tools": [WEATHER], "tool_choice": NAMED, "max_tokens": 48}


@contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


def test_sampled_answers_and_tool_calls_survive_a_busy_machine() -> None:
    check_busy_machine(seconds=4)


@pytest.mark.storm
def test_sampled_answers_and_tool_calls_survive_minutes_of_a_busy_machine() -> None:
    check_busy_machine(seconds=240)


def check_busy_machine(seconds: float) -> None:
    with Server(dtype="auto", num_threads=3, max_num_seqs=8) as server:
        server.wait_ready()
        alone = [answer(server, number) for number in range(CLIENTS)]
        with busy_neighbours(2), ThreadPoolExecutor(CLIENTS) as pool:
            until = time.monotonic() + seconds
            rounds = 0
            while rounds == 0 or time.monotonic() < until:
                assert list(pool.map(lambda number: answer(server, number), range(CLIENTS))) == alone
                rounds += 1
        server.wait_idle()
        assert server.stop() == 0
        assert "Traceback" not in server.log, server.log


def answer(server: Server, number: int) -> Any:
    """What one client gets: every other one demands a tool call, the others sample with a seed."""
    if number % 2:
        reply = server.post("/v1/chat/completions", {**CALL, "seed": number, "temperature": 0.8})
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["message"]["tool_calls"][0]["function"]
    body = {"prompt": f"Story {number}: once", "max_tokens": 32, "seed": number, "temperature": 0.9, "top_p": 0.9}
    reply = server.post("/v1/completions", body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]
