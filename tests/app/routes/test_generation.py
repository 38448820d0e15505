"""What a request asks for is what it gets: chat and completions of the real model over real HTTP."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support.harness import MODEL, Server
from tests.support.raw_client import sse_events

PATHS = ["/v1/chat/completions", "/v1/completions"]
STORY = "Once upon a time"


def body_for(path: str, text: str, **fields: object) -> dict[str, Any]:
    """A greedy request for either endpoint."""
    prompt = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    return {"model": MODEL, "temperature": 0, **prompt, **fields}


def ask(server: Server, path: str, text: str, **fields: object) -> dict[str, Any]:
    """The whole answer to a greedy request."""
    answer = server.post(path, body_for(path, text, **fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(choice: dict[str, Any]) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


def stream(server: Server, path: str, text: str, **fields: object) -> list[dict[str, Any]]:
    """All chunks of a greedy stream, which must end with [DONE]."""
    body = body_for(path, text, stream=True, **fields)
    with server.client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        *chunks, done = sse_events(answer.iter_bytes())
    assert done == "[DONE]"
    return chunks


def streamed_text(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


# --- answers


def test_the_model_knows_the_capital_of_france(server: Server) -> None:
    answer = server.chat("What is the capital of France?", max_tokens=32)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", PATHS)
def test_stream_says_what_the_whole_answer_says(server: Server, path: str) -> None:
    fields = {"max_tokens": 12, "n": 2, "logprobs": True} if "chat" in path else {"max_tokens": 12, "n": 2}
    whole = ask(server, path, STORY, **fields)
    chunks = stream(server, path, STORY, **fields)
    for choice in whole["choices"]:
        assert text_of(choice)
        assert streamed_text(chunks, choice["index"]) == text_of(choice)


def test_whole_answer_has_every_key_that_clients_read(server: Server) -> None:
    answer = server.chat("Say hello.", max_tokens=3)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL
    assert isinstance(answer["created"], int)
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["refusal"] is None
    assert choice["logprobs"] is None
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 3


# --- the event stream, byte for byte what docs of the API promise


def test_chat_stream_has_role_then_text_then_one_empty_finish(server: Server) -> None:
    chunks = stream(server, "/v1/chat/completions", STORY, max_tokens=5)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)
    first, *middle, last = [choice for chunk in chunks for choice in chunk["choices"]]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert middle
    for choice in middle:
        assert choice["delta"].keys() == {"content"}
        assert choice["delta"]["content"]
        assert choice["finish_reason"] is None
    assert last["delta"] == {}
    assert last["finish_reason"] == "length"


def test_completion_stream_has_text_then_one_empty_finish(server: Server) -> None:
    chunks = stream(server, "/v1/completions", STORY, max_tokens=5)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert chunks[0]["id"].startswith("cmpl-")
    *middle, last = [choice for chunk in chunks for choice in chunk["choices"]]
    assert all(choice["text"] and choice["finish_reason"] is None for choice in middle)
    assert last["text"] == ""
    assert last["finish_reason"] == "length"


@pytest.mark.parametrize("path", PATHS)
def test_every_choice_of_a_stream_finishes_exactly_once(server: Server, path: str) -> None:
    chunks = stream(server, path, STORY, max_tokens=4, n=3)
    finishes = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(choice["index"] for choice in finishes) == [0, 1, 2]
    if "chat" in path:
        roles = [choice["index"] for chunk in chunks for choice in chunk["choices"] if "role" in choice["delta"]]
        assert sorted(roles) == [0, 1, 2]


@pytest.mark.parametrize("path", PATHS)
def test_usage_chunk_comes_last_without_choices_and_only_when_asked_for(server: Server, path: str) -> None:
    whole = ask(server, path, STORY, max_tokens=4, n=2)
    *chunks, last = stream(server, path, STORY, max_tokens=4, n=2, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8
    assert last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)


def test_running_usage_grows_chunk_by_chunk(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(server, "/v1/completions", STORY, max_tokens=4, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4


# --- how answers end


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streamed", [False, True])
def test_text_ends_before_a_stop_string_that_spans_tokens(server: Server, path: str, streamed: bool) -> None:
    full = text_of(ask(server, path, STORY, max_tokens=16)["choices"][0])
    stop = across_two_words(full)
    before = full[: full.index(stop)]
    if streamed:
        chunks = stream(server, path, STORY, max_tokens=16, stop=["nowhere to be found", stop])
        assert streamed_text(chunks) == before
        [finish] = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    else:
        [finish] = ask(server, path, STORY, max_tokens=16, stop=stop)["choices"]
        assert text_of(finish) == before
    assert finish["finish_reason"] == "stop"
    assert finish["stop_reason"] == stop


def test_stop_string_is_kept_when_asked_for(server: Server) -> None:
    full = server.complete(STORY, max_tokens=16)["choices"][0]["text"]
    stop = across_two_words(full)
    [choice] = server.complete(STORY, max_tokens=16, stop=stop, include_stop_str_in_output=True)["choices"]
    assert choice["text"] == full[: full.index(stop)] + stop


def test_half_a_stop_string_at_the_end_is_not_swallowed(server: Server) -> None:
    full = server.complete(STORY, max_tokens=8)["choices"][0]["text"]
    chunks = stream(server, "/v1/completions", STORY, max_tokens=8, stop=full[-3:] + "never")
    assert streamed_text(chunks) == full


def test_stop_token_ends_the_answer_and_names_itself(server: Server) -> None:
    ids = greedy_ids(server, STORY, 6)
    stop = next(token_id for position, token_id in enumerate(ids) if position and token_id not in ids[:position])
    [choice] = server.complete(STORY, max_tokens=6, stop_token_ids=[stop])["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop


def test_max_completion_tokens_wins_over_max_tokens(server: Server) -> None:
    answer = server.chat(STORY, max_tokens=9, max_completion_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2
    assert answer["choices"][0]["finish_reason"] == "length"


def test_completions_stop_at_sixteen_tokens_unless_told_otherwise(server: Server) -> None:
    assert server.complete(STORY, ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_min_tokens_and_ignore_eos_hold_off_the_end(server: Server) -> None:
    question = "What is the capital of France?"
    short = server.chat(question, max_tokens=32)["usage"]["completion_tokens"]
    longer = server.chat(question, max_tokens=32, min_tokens=short + 2)["usage"]["completion_tokens"]
    assert longer >= short + 2
    unending = server.chat(question, max_tokens=short + 5, ignore_eos=True)
    assert unending["usage"]["completion_tokens"] == short + 5
    assert unending["choices"][0]["finish_reason"] == "length"


# --- what is sampled


def test_a_seed_gives_the_same_text_alone_and_among_others(server: Server) -> None:
    fields = {"temperature": 1, "seed": 7, "max_tokens": 10}
    alone = server.complete(STORY, **fields)["choices"][0]["text"]
    [first, second, _] = server.complete([STORY, STORY, "The sea"], **fields)["choices"]
    assert first["text"] == second["text"] == alone
    other = server.complete(STORY, **fields | {"seed": 8})["choices"][0]["text"]
    assert other != alone


def test_choices_of_one_sampled_request_differ_and_repeat(server: Server) -> None:
    fields = {"temperature": 1, "seed": 7, "max_tokens": 10, "n": 4}
    texts = [choice["text"] for choice in server.complete(STORY, **fields)["choices"]]
    assert len(set(texts)) == 4
    assert texts == [choice["text"] for choice in server.complete(STORY, **fields)["choices"]]


def test_logit_bias_bans_and_forces_tokens(server: Server) -> None:
    first = greedy_ids(server, STORY, 1)[0]
    free = server.complete(STORY, max_tokens=1)["choices"][0]["text"]
    banned = server.complete(STORY, max_tokens=1, logit_bias={str(first): -100})["choices"][0]["text"]
    assert banned != free
    forced = server.complete("The sea", max_tokens=3, logit_bias={str(first): 100})["choices"][0]["text"]
    assert forced == free * 3


def test_penalty_on_repetition_changes_a_loop(server: Server) -> None:
    loop = "a b a b a b a b a b a b"
    plain = server.complete(loop, max_tokens=6)["choices"][0]["text"]
    penalized = server.complete(loop, max_tokens=6, repetition_penalty=2.0, presence_penalty=2.0)["choices"][0]["text"]
    assert plain.split()[:2] == ["a", "b"]
    assert penalized != plain


def test_priority_is_accepted(server: Server) -> None:
    usage = server.complete(STORY, max_tokens=1, priority=-5)["usage"]
    assert usage["completion_tokens"] == 1


# --- log-probabilities


def test_chat_logprobs_spell_the_answer_most_likely_first(server: Server) -> None:
    answer = server.chat(STORY, max_tokens=4, logprobs=True, top_logprobs=3)
    [choice] = answer["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 4
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == choice["message"]["content"]
    for entry in content:
        top = [alternative["logprob"] for alternative in entry["top_logprobs"]]
        assert len(top) == 3
        assert top == sorted(top, reverse=True)
        assert entry["logprob"] == top[0] <= 0, "greedy takes the most likely token"


def test_completion_logprobs_are_four_parallel_arrays(server: Server) -> None:
    [choice] = server.complete(STORY, max_tokens=4, logprobs=2)["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert [len(logprobs[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [4] * 4
    offsets = itertools.accumulate((len(token) for token in logprobs["tokens"]), initial=0)
    assert logprobs["text_offset"] == list(offsets)[:-1]
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])


def test_streamed_logprobs_are_those_of_the_whole_answer(server: Server) -> None:
    fields = {"max_tokens": 4, "logprobs": True, "top_logprobs": 2}
    whole = server.chat(STORY, **fields)["choices"][0]["logprobs"]["content"]
    chunks = stream(server, "/v1/chat/completions", STORY, **fields)
    entries = [
        entry
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert [entry["token"] for entry in entries] == [entry["token"] for entry in whole]
    assert [entry["logprob"] for entry in entries] == pytest.approx([entry["logprob"] for entry in whole], abs=1e-4)


# --- prompts


def test_token_ids_and_text_of_one_prompt_give_one_answer(server: Server) -> None:
    whole = server.complete(STORY, max_tokens=4)
    ids = prompt_ids(server, STORY)
    assert len(ids) == whole["usage"]["prompt_tokens"]
    assert server.complete(ids, max_tokens=4)["choices"][0]["text"] == whole["choices"][0]["text"]


def test_several_prompts_are_answered_in_their_order(server: Server) -> None:
    prompts = [STORY, "The sea", "Two plus two is"]
    answer = server.complete(prompts, max_tokens=4, n=2)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    solo = [server.complete(prompt, max_tokens=4) for prompt in prompts]
    for index, choice in enumerate(answer["choices"]):
        assert choice["text"] == solo[index // 2]["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in solo)
    assert answer["usage"]["completion_tokens"] == 24
    chunks = stream_prompts(server, prompts)
    assert [streamed_text(chunks, index) for index in range(6)] == [choice["text"] for choice in answer["choices"]]


def test_content_parts_are_joined_and_roles_reach_the_template(server: Server) -> None:
    parts = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": "of France?"}]
    messages = [{"role": "system", "content": "You answer in one word."}, {"role": "user", "content": parts}]
    answer = server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 16})
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]


def test_a_repeated_prompt_comes_from_the_prefix_cache_and_says_so(server: Server) -> None:
    prompt = "A prompt that no other test sends, long enough for three blocks. " * 5
    first = server.complete(prompt, max_tokens=4)
    second = server.complete(prompt, max_tokens=4)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < second["usage"]["prompt_tokens"]
    assert cached % 16 == 0
    assert second["choices"][0]["text"] == first["choices"][0]["text"]


def test_text_of_many_scripts_is_never_broken(server: Server) -> None:
    chunks = stream(server, "/v1/completions", "日本語 🦙 é: 日本語 🦙 é: 日本語 🦙", max_tokens=24)
    whole = server.complete("日本語 🦙 é: 日本語 🦙 é: 日本語 🦙", max_tokens=24)["choices"][0]["text"]
    assert streamed_text(chunks) == whole
    assert "�" not in whole[:-1]


# --- helpers


def stream_prompts(server: Server, prompts: list[str]) -> list[dict[str, Any]]:
    body = {"prompt": prompts, "max_tokens": 4, "n": 2, "temperature": 0, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as answer:
        *chunks, _ = sse_events(answer.iter_bytes())
    return chunks


def across_two_words(text: str) -> str:
    """A slice from within the second word to within the third: it begins and ends inside tokens."""
    space = text.strip().index(" ", text.strip().index(" ") + 1)
    return text.strip()[space - 2 : space + 3]


def prompt_ids(server: Server, text: str) -> list[int]:
    """The ids of a text, by the tokenizer that the server uses."""
    from gpu.checkpoint import open_model

    return open_model(MODEL).tokenizer.encode(text).ids


def greedy_ids(server: Server, prompt: str, count: int) -> list[int]:
    """The ids of the greedy answer to `prompt`."""
    text = server.complete(prompt, max_tokens=count)["choices"][0]["text"]
    return prompt_ids(server, prompt + text)[len(prompt_ids(server, prompt)) :]
