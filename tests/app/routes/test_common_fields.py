"""Fields of the common request do in every dialect what they do in chat, on a real server."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import pytest

from tests.support.harness import MODEL, Server

LONG = "The sea is wide and the sky is high. " * 12


class Spoken(NamedTuple):
    """The request of a dialect, and the places of text and numbers in its answer."""

    path: str
    limit: str
    messages: str

    def ask(self, server: Server, question: str, *, max_tokens: int = 24, **fields: Any) -> Any:
        turn = [{"role": "user", "content": question}]
        body = {"model": MODEL, self.messages: turn, self.limit: max_tokens, "temperature": 0, **fields}
        answer = server.post(self.path, body)
        assert answer.status_code == 200, answer.text
        assert "x-headrace-warning" not in answer.headers
        return answer.json()

    def text(self, answer: Any) -> str:
        if "choices" in answer:
            return answer["choices"][0]["message"]["content"]
        content = answer["output"][0]["content"] if "output" in answer else answer["content"]
        return "".join(part["text"] for part in content)

    def num_prompt(self, answer: Any) -> int:
        usage = answer["usage"]
        if "prompt_tokens" in usage:
            return usage["prompt_tokens"]
        return usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)  # Anthropic's are apart

    def num_cached(self, answer: Any) -> int:
        usage = answer["usage"]
        for name in ("prompt_tokens_details", "input_tokens_details"):
            if name in usage:
                return usage[name]["cached_tokens"]
        return usage["cache_read_input_tokens"]


CHAT = Spoken("/v1/chat/completions", "max_tokens", "messages")
MESSAGES = Spoken("/v1/messages", "max_tokens", "messages")
RESPONSES = Spoken("/v1/responses", "max_output_tokens", "input")
EVERY = pytest.mark.parametrize("spoken", [CHAT, MESSAGES, RESPONSES], ids=lambda spoken: spoken.path)

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
CLOSED = {**SCHEMA, "additionalProperties": False}


@pytest.mark.slow
@EVERY
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"ebnf": 'root ::= "x" [0-9]'}, "x[0-9]"),
        ({"grammar": 'start: "x" /[0-9]/'}, "x[0-9]"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"regex": "[a-c]{3}"}}, "[a-c]{3}"),
        ({"json_schema": CLOSED}, None),
        ({"guided_json": CLOSED}, None),
        ({"guided_json_object": True, "max_tokens": 4}, r"\{[\s\S]*"),
    ],
    ids=lambda value: str(value)[:32],
)
def test_a_grammar_constrains(server: Server, spoken: Spoken, fields: dict[str, Any], pattern: str | None) -> None:
    text = spoken.text(spoken.ask(server, "Hello", **fields))
    if pattern is None:
        assert json.loads(text)["n"] <= 9
    else:
        assert re.fullmatch(pattern, text)


@pytest.mark.slow
@EVERY
def test_another_salt_finds_nothing_in_the_cache(server: Server, spoken: Spoken) -> None:
    question = f"{spoken.path}: {LONG}"
    first, again, other = (
        spoken.num_cached(spoken.ask(server, question, max_tokens=1, cache_salt=f"{spoken.path[4:7]}-{salt}"))
        for salt in ("a", "a", "b")
    )
    assert first == other == 0
    assert again > 0


@EVERY
def test_a_prompt_is_cut_and_words_are_kept_out(server: Server, spoken: Spoken) -> None:
    whole = spoken.ask(server, LONG)
    assert spoken.num_prompt(whole) > 40
    assert spoken.num_prompt(spoken.ask(server, LONG, max_tokens=1, truncate_prompt_tokens=40)) == 40
    word = next(word for word in re.findall(r"[A-Za-z]{3,}", spoken.text(whole)))
    assert word not in spoken.text(spoken.ask(server, LONG, bad_words=[word]))
    stop: dict[str, Any] = {"stop_sequences" if spoken is MESSAGES else "stop": [word]}
    begun, _, _ = spoken.text(whole).partition(word)
    assert spoken.text(spoken.ask(server, LONG, **stop)) == begun
    assert spoken.text(spoken.ask(server, LONG, **stop, include_stop_str_in_output=True)) == begun + word


PROMPT: Any = {"prompt": "Hi"}
SLIPS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT.path, {"messages": [{"role": "user", "content": "Hi"}], "temprature": 0}, "temperature"),
    ("/v1/completions", PROMPT | {"max_token": 1}, "max_tokens"),
    (
        MESSAGES.path,
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "stop_sequence": ["a"]},
        "stop_sequences",
    ),
    (RESPONSES.path, {"input": "Hi", "max_output_token": 16}, "max_output_tokens"),
    ("/api/generate", PROMPT | {"stream": False, "options": {"temprature": 0, "num_predict": 1}}, "temperature"),
    ("/v1/embeddings", {"input": "Hi", "dimension": 8}, "dimensions"),
    ("/tokenize", PROMPT | {"add_special_token": True}, "add_special_tokens"),
]


@pytest.mark.parametrize(("path", "body", "meant"), SLIPS, ids=[path for path, _, _ in SLIPS])
def test_a_misspelt_field_comes_back_with_the_name_that_was_meant(
    server: Server, path: str, body: dict[str, Any], meant: str
) -> None:
    limit = {} if "max" in str(body) or path in ("/v1/embeddings", "/tokenize", "/api/generate") else {"max_tokens": 1}
    answer = server.post(path, body | limit | {"zzz": 1})
    assert answer.status_code == 200, answer.text
    warning = answer.headers["x-headrace-warning"]
    assert f"(did you mean {meant}?)" in warning
    assert "zzz (this server" in warning or "zzz, " in warning
