"""Structured output through the `openai` package, as clients of OpenAI, vLLM, SGLang and llama.cpp ask for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from tests.support.harness import MODEL, TIMEOUT, Server

QUESTION = [{"role": "user", "content": "Describe Alice, who is 30, lives in Paris and plays chess."}]
ASKING: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 60}


class Person(pydantic.BaseModel):
    """What an answer is to be."""

    name: str = pydantic.Field(max_length=16)
    age: int = pydantic.Field(ge=0, le=150)
    city: Literal["Paris", "London"]


SMALL = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
NAMED = {"name": "small", "schema": SMALL, "strict": True}


@pytest.fixture
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as client:
        yield client


def test_parse_gives_the_class_that_was_asked_for(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.parse(**ASKING, response_format=Person)
    assert isinstance(answer.choices[0].message.parsed, Person)
    assert answer.choices[0].finish_reason == "stop"
    with sdk.chat.completions.stream(**ASKING, response_format=Person) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.parsed == answer.choices[0].message.parsed
    assert streamed.choices[0].message.content == answer.choices[0].message.content


TAG = {"type": "structural_tag", "triggers": ["<f"], "structures": [{"begin": "<f>", "schema": SMALL, "end": "</f>"}]}
DIGITS = r"[0-9]{3}-[0-9]{4}"


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, None),
        ({"response_format": {"type": "json_object", "schema": SMALL}}, None),
        ({"structured_outputs": {"json": SMALL, "disable_any_whitespace": True}}, None),
        ({"structured_outputs": {"regex": r"\d{3}-\d{4}"}}, DIGITS),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9]'}}, "a[0-9]"),
        ({"structured_outputs": {"grammar": 'start: "a" /[0-9]/'}}, "a[0-9]"),
        ({"guided_json": json.dumps(SMALL), "guided_whitespace_pattern": " "}, None),
        ({"guided_regex": r"\d{3}-\d{4}"}, DIGITS),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "a" [0-9]'}, "a[0-9]"),
        ({"json_schema": SMALL}, None),
        ({"regex": r"\d{3}-\d{4}"}, DIGITS),
        ({"ebnf": 'root ::= "a" [0-9]'}, "a[0-9]"),
        ({"grammar": 'root ::= "a" [0-9]'}, "a[0-9]"),
        ({"response_format": TAG, "max_tokens": 3}, r"[\s\S]*"),
    ],
    ids=lambda value: str(value)[:48],
)
def test_every_spelling_is_honoured_in_chats_and_completions(server: Server, fields: dict, pattern: str | None) -> None:
    whole = server.post("/v1/chat/completions", ASKING | fields).json()["choices"][0]
    completed = server.post(
        "/v1/completions", {"prompt": "Alice:", "temperature": 1, "seed": 3, "max_tokens": 60} | fields
    ).json()["choices"][0]
    for text, reason in (
        (whole["message"]["content"], whole["finish_reason"]),
        (completed["text"], completed["finish_reason"]),
    ):
        if pattern is None:
            jsonschema.validate(json.loads(text), SMALL)
        else:
            assert re.fullmatch(pattern, text)
        assert reason == ("stop" if "max_tokens" not in fields else "length")


def test_what_is_said_in_the_new_field_of_vllm_and_in_the_old_one_too_holds_as_the_new_one_says(server: Server) -> None:
    """Some clients send both because they do not know the version of vLLM; guidance's grammars count tokens."""
    lark = '%llguidance {}\nstart: "It is " answer "."\nanswer[capture, max_tokens=3]: /[a-z]+/\n'
    both = {"structured_outputs": {"grammar": lark}, "guided_grammar": 'root ::= "no"', "guided_decoding_backend": "x"}
    for path, body in (("/v1/chat/completions", ASKING), ("/v1/completions", {"prompt": "Hi", "temperature": 0})):
        answer = server.post(path, {**body, **both, "logprobs": None})
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert re.fullmatch(r"It is [a-z]+\.", text)
        unused = "guided_decoding_backend, guided_grammar (this server does not use them)"
        assert answer.headers["x-headrace-warning"] == f"fields without effect: {unused}"


def test_any_json_object(sdk: openai.OpenAI) -> None:
    unsaid = {"type": "json_schema", "json_schema": {"name": "any"}}
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"response_format": unsaid}},
        {"extra_body": {"guided_json_object": True}},
    ):
        answer = sdk.chat.completions.create(**ASKING | {"max_tokens": 6}, **fields)
        assert (answer.choices[0].message.content or "").startswith("{")


def test_choices_of_a_mixed_batch_do_not_disturb_each_other(server: Server, sdk: openai.OpenAI) -> None:
    def ask(fields: dict[str, Any]) -> list[str]:
        stream = sdk.chat.completions.create(**ASKING, **fields, stream=True)
        texts = ["", ""]
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        return texts

    plain: dict[str, Any] = {"stop": ["."]}
    alone = ask(plain)
    person = {"response_format": {"type": "json_schema", "json_schema": NAMED}}
    digits = {"extra_body": {"guided_regex": r"\d{3}-\d{4}"}, "n": 2}
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(ask, [plain, person, digits] * 2))
    assert texts[0] == texts[3] == alone
    for several in (texts[1], texts[4]):
        jsonschema.validate(json.loads(several[0]), SMALL)
    for several in (texts[2], texts[5]):
        assert all(re.fullmatch(DIGITS, text) for text in several)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"response_format": {"type": "json_schema", "json_schema": 5}}, "response_format.json_schema", "object"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
        ({"response_format": TAG | {"triggers": ["<g"]}}, "response_format.structures.0.begin", "triggers"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "exactly one"),
        ({"guided_json": {}, "regex": "a"}, "regex", "guided_json"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", '"uniqueItems"'),
        ({"guided_json": {"enum": ["a" * 200_000]}}, "guided_json", "at most 131072 characters"),
    ],
    ids=lambda value: str(value)[:48],
)
def test_what_cannot_be_honoured_is_refused_by_name(server: Server, fields: dict, param: str, words: str) -> None:
    for stream in (False, True):
        answer = server.post("/v1/chat/completions", ASKING | fields | {"stream": stream})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert words in answer.json()["error"]["message"]
    assert "uniqueItems" not in server.log, "what clients send is not logged"


def test_only_allowed_tokens_come_and_bad_words_do_not(server: Server) -> None:
    plain = server.complete("The capital of France is", max_tokens=6, return_token_ids=True)["choices"][0]
    assert "Paris" in plain["text"]
    for fields in ({}, {"n": 2, "temperature": 1.0, "seed": 3}):
        answer = server.complete("The capital of France is", max_tokens=6, bad_words=["Paris", "the city"], **fields)
        assert all("Paris" not in choice["text"] and "the city" not in choice["text"] for choice in answer["choices"])
    allowed = plain["token_ids"][1:3]
    answer = server.complete("The capital of France is", max_tokens=6, allowed_token_ids=allowed, return_token_ids=True)
    assert set(answer["choices"][0]["token_ids"]) <= set(allowed)
    both = server.complete(
        "The capital of France is", max_tokens=6, guided_choice=["Paris", "London"], bad_words=["Paris"]
    )
    assert both["choices"][0]["text"] == "London"
    impossible = {"prompt": "The capital of France is", "max_tokens": 6, "guided_choice": ["Paris"]}
    refused = server.post("/v1/completions", impossible | {"allowed_token_ids": [5]})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(
        "allowed_token_ids and guided_choice together allow no next token"
    )
