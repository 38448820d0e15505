"""Log-probabilities of every token, and of tokens by name: bounded, and nobody else notices."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from protocol.openai.generation import MAX_LOGPROBS_IN_ALL
from tests.support.harness import Server
from tests.support.streams import stream
from tests.support.tiny_model import VOCABULARY, tiny_server

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
COMPLETION = {"prompt": [[5, 6, 7]], "return_tokens_as_token_ids": True}
GREEDY = {"temperature": 0, "ignore_eos": True}
FITTING = MAX_LOGPROBS_IN_ALL // VOCABULARY


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tiny_server(max_model_len=256) as running:
        yield running.wait_ready()


@pytest.mark.slow
def test_all_of_the_vocabulary_is_told(server: Server) -> None:
    body = {**CHAT, **GREEDY, "top_logprobs": -1, "max_tokens": 2}
    for position in server.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]:
        values = [entry["logprob"] for entry in position["top_logprobs"]]
        assert len(values) == VOCABULARY
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) == pytest.approx(1.0, abs=1e-3)
        assert position["logprob"] == values[0]
    fields = {**COMPLETION, **GREEDY, "logprobs": -1, "prompt_logprobs": -1, "max_tokens": 1, "echo": True}
    choice = server.post("/v1/completions", fields).json()["choices"][0]
    assert choice["logprobs"]["top_logprobs"][0] is choice["prompt_logprobs"][0] is None
    for told in (*choice["logprobs"]["top_logprobs"][1:], *choice["prompt_logprobs"][1:]):
        assert len(told) == VOCABULARY
    streamed = stream(server, "/v1/completions", {**fields, "prompt_logprobs": None})
    assert streamed.choices[0].logprobs == choice["logprobs"]


@pytest.mark.slow
def test_named_tokens_are_told_beside_the_sampled_one(server: Server) -> None:
    named = [7, 49151, 5, 7]
    everything = server.post("/v1/completions", {**COMPLETION, **GREEDY, "logprobs": -1, "max_tokens": 2}).json()
    fields = {**COMPLETION, **GREEDY, "logprobs": 3, "max_tokens": 2, "logprob_token_ids": named}
    found = server.post("/v1/completions", fields).json()
    for told, known in zip(
        *(answer["choices"][0]["logprobs"]["top_logprobs"] for answer in (found, everything)), strict=True
    ):
        assert list(told)[:3] == ["token_id:7", "token_id:49151", "token_id:5"]
        assert len(told) <= 4
        assert told == {name: pytest.approx(known[name], abs=1e-5) for name in told}
    body = {**CHAT, **GREEDY, "max_tokens": 2, "logprob_token_ids": [9, 3]}
    for position in server.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]:
        assert len(position["top_logprobs"]) == 3
        assert position["top_logprobs"][2] == {name: position[name] for name in ("token", "logprob", "bytes")}


def test_what_would_be_too_many_is_refused_with_a_limit_that_works(server: Server) -> None:
    body = {**COMPLETION, **GREEDY, "logprobs": -1}
    for max_tokens in (FITTING + 1, 10**6, -1):
        error = server.post("/v1/completions", {**body, "max_tokens": max_tokens}).json()["error"]
        assert error["param"] == "logprobs"
        assert f"max_tokens of at most {FITTING}" in error["message"]
    chat = server.post("/v1/chat/completions", {**CHAT, "top_logprobs": -1}).json()["error"]
    assert chat["param"] == "top_logprobs"
    long = {"prompt": [[5] * (FITTING + 1)], "prompt_logprobs": -1, "max_tokens": 1}
    assert server.post("/v1/completions", long).json()["error"]["param"] == "prompt_logprobs"
    assert server.post("/v1/responses", {"input": "a", "top_logprobs": -1}).status_code == 400


@pytest.mark.slow
def test_the_most_that_fits_holds_nobody_up(server: Server) -> None:
    """The server's harness fails a test whose requests have held the event loop."""
    most = {**COMPLETION, **GREEDY, "logprobs": -1, "max_tokens": FITTING}
    with ThreadPoolExecutor(3) as pool:
        whole = pool.submit(server.post, "/v1/completions", most)
        with server.client.stream("POST", "/v1/completions", json={**most, "stream": True}) as answer:
            chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        others = server.complete([[5, 6]], max_tokens=8, ignore_eos=True)
        assert others["usage"]["completion_tokens"] == 8
        assert len(whole.result().json()["choices"][0]["logprobs"]["tokens"]) == FITTING
    assert sum(len((chunk["choices"][0]["logprobs"] or {"tokens": []})["tokens"]) for chunk in chunks) == FITTING
