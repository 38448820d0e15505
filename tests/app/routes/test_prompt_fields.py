"""What a request may ask of its prompt, over HTTP: echo, log-probabilities, token ids, truncation, continuation."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from gpu.checkpoint import open_model
from tests.golden.oracle import Oracle
from tests.support.embedded_model import embedded_gguf
from tests.support.harness import MODEL, Server
from tests.support.streams import stream

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CONTEXT = "The capital of France is"
CONTINUATIONS = [" Paris.", " London.", " a city with a long history: 水と😀"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """As exact as the reference implementation."""
    with Server(dtype="float32", max_model_len=512) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_model(MODEL).tokenizer


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle.from_gguf(embedded_gguf())


def refusal(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


# --- echo


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_loglikelihoods_as_evaluation_harnesses_ask_for_them(
    server: Server, tokenizer: Tokenizer, oracle: Oracle, max_tokens: int
) -> None:
    """Context and continuation as token ids, echoed with log-probabilities; what is generated is thrown away."""
    prompts = [tokenizer.encode(CONTEXT + continuation).ids for continuation in CONTINUATIONS]
    body = server.complete(prompts, max_tokens=max_tokens, echo=True, logprobs=1)
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert body["usage"]["completion_tokens"] == max_tokens * len(prompts)
    start = len(tokenizer.encode(CONTEXT).ids)
    for choice, prompt in zip(body["choices"], prompts, strict=True):
        logprobs = choice["logprobs"]
        assert {len(column) for column in logprobs.values()} == {len(prompt) + max_tokens}
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        rows = oracle.logprobs(prompt[:1], prompt[1:])
        expected = [rows[i - 1, prompt[i]].item() for i in range(start, len(prompt))]
        assert logprobs["token_logprobs"][start : len(prompt)] == pytest.approx(expected, abs=1e-3)
        is_greedy = [int(rows[i - 1].argmax()) == prompt[i] for i in range(start, len(prompt))]
        likely = zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        assert [own == max(top.values()) for own, top in list(likely)[start : len(prompt)]] == is_greedy


@pytest.mark.slow
def test_echo_puts_the_prompt_before_the_answer(server: Server) -> None:
    fields = {"max_tokens": 6, "n": 2, "seed": 7, "temperature": 0.7, "logprobs": 0}
    prompts = ["A flock of 🐈‍⬛ cats", "Once upon a time"]
    plain = server.complete(prompts, **fields)["choices"]
    echoed = server.complete(prompts, **fields, echo=True)["choices"]
    for index, (without, with_echo) in enumerate(zip(plain, echoed, strict=True)):
        assert with_echo["text"] == prompts[index // 2] + without["text"]
        assert with_echo["logprobs"]["token_logprobs"][-6:] == pytest.approx(without["logprobs"]["token_logprobs"])
        offsets = with_echo["logprobs"]["text_offset"]
        assert offsets[-6:] == [len(prompts[index // 2]) + offset for offset in without["logprobs"]["text_offset"]]
        assert offsets[0] == 0
    streamed = stream(server, COMPLETIONS, {"prompt": prompts, **fields, "echo": True})
    for whole, part in zip(echoed, streamed.choices, strict=True):
        assert part.text == whole["text"]
        assert part.logprobs is not None
        assert part.logprobs["tokens"] == whole["logprobs"]["tokens"]
        assert part.logprobs["text_offset"] == whole["logprobs"]["text_offset"]


@pytest.mark.slow
def test_an_echo_without_an_answer_is_streamed_too(server: Server) -> None:
    streamed = stream(server, COMPLETIONS, {"prompt": CONTEXT, "echo": True, "max_tokens": 0})
    assert (streamed.choices[0].text, streamed.choices[0].finish_reason) == (CONTEXT, "length")
    assert refusal(server, COMPLETIONS, {"prompt": CONTEXT, "max_tokens": 0})["param"] == "max_tokens"


# --- log-probabilities and ids


def test_prompt_logprobs(server: Server, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(CONTEXT).ids
    choice = server.complete(CONTEXT, max_tokens=1, prompt_logprobs=2)["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert len(others) == len(prompt) - 1
    for token_id, part in zip(prompt[1:], others, strict=True):
        own = part[str(token_id)]
        assert own["decoded_token"] == tokenizer.decode([token_id])
        assert -math.inf < own["logprob"] <= 0
        assert {entry["rank"] for entry in part.values()} == {1, 2, own["rank"]}
        assert len(part) == (2 if own["rank"] <= 2 else 3)
    chat = server.chat("Hi", max_tokens=1, prompt_logprobs=0)
    assert [len(part) for part in chat["prompt_logprobs"][1:]] == [1] * (chat["usage"]["prompt_tokens"] - 1)
    assert server.chat("Hi", max_tokens=1)["prompt_logprobs"] is None


@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, {"prompt": "a b"}), (CHAT, {"messages": "Hi"})])
def test_token_ids_are_returned(server: Server, tokenizer: Tokenizer, path: str, prompt: dict[str, Any]) -> None:
    if path == CHAT:
        prompt = {"messages": [{"role": "user", "content": "Hi"}]}
    body = {**prompt, "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    answer = server.post(path, body | {"logprobs": 0 if path == COMPLETIONS else True}).json()
    choice = answer["choices"][0]
    asked = (choice if path == COMPLETIONS else answer)["prompt_token_ids"]
    assert len(asked) == answer["usage"]["prompt_tokens"]
    text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    assert tokenizer.decode(choice["token_ids"]) == text
    streamed = stream(server, path, body)
    assert streamed.choices[0].token_ids == choice["token_ids"]
    assert streamed.prompt_token_ids == asked


def test_tokens_by_their_ids(server: Server) -> None:
    fields = {"max_tokens": 3, "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = server.complete("a", **fields, logprobs=1)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    content = server.chat("a", **fields, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert all(entry["token"].startswith("token_id:") and entry["bytes"] for entry in content)


# --- which part of the prompt counts


def test_a_prompt_is_cut_to_what_the_client_wants(server: Server, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three four five six seven").ids
    for side, kept in (("left", ids[-3:]), ("right", ids[:3])):
        fields = {"truncate_prompt_tokens": 3, "truncation_side": side, "max_tokens": 2}
        cut = server.complete("one two three four five six seven", **fields, echo=True, return_token_ids=True)
        assert cut["choices"][0]["prompt_token_ids"] == kept
        assert cut["choices"][0]["text"].startswith(tokenizer.decode(kept))
    ends_at_once = {"logit_bias": {"2": 100}}
    rest = server.complete([5] * 3000, truncate_prompt_tokens=-1, max_tokens=200, **ends_at_once)
    assert rest["usage"]["prompt_tokens"] == 512 - 200


def test_the_final_message_is_continued(server: Server, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Count to five."}, {"role": "assistant", "content": "One, two, "}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    answer = server.post(CHAT, body | {"continue_final_message": True, "echo": True}).json()
    prompt = tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nOne, two, ")
    assert answer["choices"][0]["message"]["content"].startswith("One, two, ")
    assert len(answer["choices"][0]["token_ids"]) == 4
    without = server.post(CHAT, body | {"add_generation_prompt": False}).json()
    assert tokenizer.decode(without["prompt_token_ids"], skip_special_tokens=False).endswith("<|im_end|>\n")


# --- names and places


def test_a_request_names_itself(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 1, "request_id": "mine"}
    answer = server.post(COMPLETIONS, body)
    assert (answer.json()["id"], answer.headers["x-request-id"]) == ("cmpl-mine", "mine")
    assert server.post(COMPLETIONS, body, **{"X-Request-Id": "header"}).json()["id"] == "cmpl-header"


def test_priority_comes_in_a_header_too(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    assert server.post(COMPLETIONS, body, **{"X-Vllm-Priority": "-3"}).status_code == 200
    for wrong in ("high", "1.5", "9" * 4000):
        answer = server.post(COMPLETIONS, body, **{"X-Vllm-Priority": wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Vllm-Priority")


@pytest.mark.slow
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_tells_the_prompts_log_probabilities_in_its_first_chunk(server: Server, path: str) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "One two three"}
    body = {**asked, "max_tokens": 2, "temperature": 0, "prompt_logprobs": 2, "return_token_ids": True}
    whole = server.post(path, body).json()
    with server.client.stream("POST", path, json={**body, "stream": True}) as answer:
        first, *others = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    told = whole if path == CHAT else whole["choices"][0]
    chunk = first if path == CHAT else first["choices"][0]
    for name in ("prompt_logprobs", "prompt_token_ids"):
        assert chunk[name] == told[name]
        assert not any(name in each or name in each["choices"][0] for each in others)
