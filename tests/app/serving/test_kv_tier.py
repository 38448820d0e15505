"""A server that keeps KV blocks on disk: what it finds there is what it would have computed, whoever died meanwhile.

All texts are greedy, and cold is a `cache_salt` of its own, which nobody shares.
"""

from __future__ import annotations

import operator
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.harness import Server

PIECE = 32  # tokens
PROMPTS = [[number * 997 % 40000 + 100 + (i * i * 31 + i * number) % 5000 for i in range(500)] for number in range(6)]
ANSWER = {"max_tokens": 8, "ignore_eos": True}


class Serving(Server):
    """With a directory, whatever the machine has measured."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(kv_cache_dir=folder, **settings)

    def command(self) -> list[str]:
        return [*super().command()[:-1], "tests.support.believed_tiers:main"]


def ask(server: Server, prompt: list[int], **fields: Any) -> tuple[str, int]:
    """The text, and how many tokens were cached."""
    body = server.complete(prompt, **ANSWER, **fields)
    return body["choices"][0]["text"], body["usage"]["prompt_tokens_details"]["cached_tokens"]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.kv"))


def wait_for_files(server: Server, folder: Path, count: int) -> None:
    server.poll(lambda: len(files(folder)), lambda found: found >= count, 0.02)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def wait_for_size(server: Server, folder: Path, *, wake: bool = False) -> None:
    """Until the server has told how much lies there: it has seen all of it. An engine that sleeps tells nothing."""
    size = sum(path.stat().st_size for path in files(folder))

    def look() -> float | None:
        if wake:
            server.complete([[5]], max_tokens=1)
        return server.metrics().samples.get("headrace:kv_tier_bytes{tier=disk}")

    server.poll(look, partial(operator.eq, size), 0.05)


@pytest.fixture(scope="module")
def once_filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("filled") / "kv"
    with Serving(folder) as server:
        ask(server.wait_ready(), PROMPTS[1], prompt_cache_retention="in_memory")
        text, cached = ask(server, PROMPTS[0])
        assert cached == 0
        wait_for_files(server, folder, 500 // PIECE)
        assert len(files(folder)) == 500 // PIECE, "nothing of the prompt that is to stay in memory"
        wait_for_size(server, folder)  # told though nobody asks for anything any more
    return folder, text


@pytest.fixture
def filled(once_filled: tuple[Path, str], folder: Path) -> tuple[Path, str]:
    """A directory with the pieces of the first prompt, and its text."""
    source, text = once_filled
    shutil.copytree(source, folder)
    return folder, text


@pytest.mark.slow
def test_a_restarted_server_finds_what_the_one_before_has_computed(filled: tuple[Path, str]) -> None:
    folder, text = filled
    with Serving(folder) as server:
        server.wait_ready()
        wait_for_size(server, folder)
        assert server.metrics().samples["headrace:kv_tier_hit_tokens_total{tier=disk}"] == 0
        assert ask(server, PROMPTS[0], cache_salt="other") == (text, 0)
        answer = server.post("/v1/completions", {"prompt": PROMPTS[0], "temperature": 0, **ANSWER})
        assert answer.json()["choices"][0]["text"] == text
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 480
        path = f"/v1/requests/{answer.headers['x-request-id']}/timeline"
        timeline = server.poll(lambda: server.client.get(path), lambda found: found.status_code == 200).json()
        events = [(event["event"], event["tokens"]) for event in timeline["events"]]
        assert events[:3] == [("loading", 480), ("loaded_from_disk", 480), ("scheduled", 480)]
        found = server.metrics().samples
        assert found["headrace:kv_tier_hit_tokens_total{tier=disk}"] == 480
        assert found["headrace:kv_tier_loaded_bytes_total{tier=disk}"] == 480 * 30 * 768
        assert found["headrace:kv_tier_load_seconds_total{tier=disk}"] > 0
        assert found["headrace:kv_tier_failed_loads_total{tier=disk}"] == 0
        assert "KV blocks are stored in" in server.log


@pytest.mark.slow
def test_damaged_files_are_computed_again_with_a_line_in_the_log(filled: tuple[Path, str]) -> None:
    folder, text = filled
    for number, path in enumerate(files(folder)):
        content = bytearray(path.read_bytes())
        content[number * 40 % 300] ^= 4
        path.write_bytes(content[: len(content) - number % 3])
    with Serving(folder) as server:
        assert ask(server.wait_ready(), PROMPTS[0]) == (text, 0)
        assert "cannot be used and is removed" in server.log
        assert server.metrics().samples["headrace:kv_tier_failed_loads_total{tier=disk}"] == 15
        wait_for_files(server, folder, 15)


@pytest.mark.slow
def test_another_build_or_model_finds_nothing(filled: tuple[Path, str]) -> None:
    folder, text = filled
    with Serving(folder, block_size=32) as server:
        assert ask(server.wait_ready(), PROMPTS[0]) == (text, 0)
    assert len({path.parent for path in files(folder)}) == 2


@pytest.mark.slow
def test_two_servers_share_a_directory(filled: tuple[Path, str]) -> None:
    folder, text = filled
    with Serving(folder) as one, Serving(folder) as other:
        one.wait_ready(), other.wait_ready()
        assert ask(one, PROMPTS[0]) == ask(other, PROMPTS[0]) == (text, 480)
        fresh, _ = ask(one, PROMPTS[1])
        wait_for_files(one, folder, 30)
        wait_for_size(other, folder, wake=True)  # it looks around once a second
        assert ask(other, PROMPTS[1]) == (fresh, 480)


@pytest.mark.slow
def test_whoever_leaves_while_loading_leaves_nothing(filled: tuple[Path, str]) -> None:
    folder, text = filled
    with Serving(folder) as server:
        server.wait_ready()
        body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 3000, "ignore_eos": True, "stream": True}
        for pause in (0.0, 0.001, 0.003, 0.01, 0.02):
            with server.client.stream("POST", "/v1/completions", json=body):
                time.sleep(pause)
        server.wait_idle()
        assert ask(server, PROMPTS[0])[0] == text
        server.wait_idle()


def kill_servers(folder: Path, times: int) -> None:
    draw = random.Random(5)
    with Server() as server:
        server.wait_ready()
        texts = [ask(server, prompt)[0] for prompt in PROMPTS]
    answered = cached = 0

    def client(server: Server, seed: int) -> int:
        nonlocal answered, cached
        own = random.Random(seed)
        while True:
            number = own.randrange(len(PROMPTS))
            try:
                text, tokens = ask(server, PROMPTS[number])
            except httpx.TransportError:
                return 0
            assert text == texts[number], f"wrong text after {answered} answers"
            answered += 1
            cached += tokens

    for _ in range(times):
        with Serving(folder, kv_cache_dir_size="40MiB") as server, ThreadPoolExecutor(3) as pool:
            server.wait_ready()
            enough = answered + len(PROMPTS)
            clients = [pool.submit(client, server, draw.randrange(2**32)) for _ in range(3)]
            server.poll(lambda: answered, partial(operator.lt, enough))
            time.sleep(draw.random())
            server.kill()
            assert [each.result() for each in clients] == [0, 0, 0]
            assert "Traceback" not in server.log, server.log
    with Serving(folder, kv_cache_dir_size="40MiB") as server:
        server.wait_ready()
        again = [ask(server, prompt) for prompt in PROMPTS]
        assert [text for text, _ in again] == texts
        server.poll(lambda: list(folder.glob("*/*.tmp")), lambda drafts: not drafts)  # its own come and go
    assert cached + sum(tokens for _, tokens in again)


@pytest.mark.slow
def test_servers_that_are_killed_leave_nothing_wrong(folder: Path) -> None:
    kill_servers(folder, 2)


@pytest.mark.storm
@pytest.mark.timeout(3600)
def test_a_hundred_servers_that_are_killed_leave_nothing_wrong(folder: Path) -> None:
    kill_servers(folder, 100)
