"""Requests of Ollama's API as the server's own: every option is obeyed, refused by name or warned of."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from engine.errors import InvalidRequest
from engine.messages import SamplingParams, StructuredOutputKind
from protocol.body import parse_body
from protocol.errors import ApiError, to_api_error
from protocol.ollama.requests import (
    EmbedRequest,
    GenerateRequest,
    NamedModelRequest,
    OllamaChat,
    OllamaChatRequest,
    PromptEmbedRequest,
    RawCompletion,
)
from tests.protocol.request_helpers import VOCAB

USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> OllamaChatRequest:
    return parse_body(OllamaChatRequest, orjson.dumps({"model": "m", "messages": [USER], **fields}))


def generate(**fields: Any) -> GenerateRequest:
    return parse_body(GenerateRequest, orjson.dumps({"model": "m", "prompt": "Hello", **fields}))


def sampling(**options: Any) -> SamplingParams:
    return chat(options=options).translate().to_sampling_params(VOCAB)


def refusal(**fields: Any) -> ApiError:
    try:
        translated = chat(**fields).translate()
    except ApiError as error:
        return error
    with pytest.raises(InvalidRequest) as caught:
        translated.to_sampling_params(VOCAB)
    return to_api_error(translated.in_client_words(caught.value))


OPTIONS = {
    "temperature": (0.5, "temperature", 0.5),
    "top_k": (7, "top_k", 7),
    "top_p": (0.5, "top_p", 0.5),
    "min_p": (0.1, "min_p", 0.1),
    "seed": (5, "seed", 5),
    "num_predict": (3, "max_tokens", 3),
    "stop": (["a"], "stop", ("a",)),
    "repeat_penalty": (1.5, "repetition_penalty", 1.5),
    "presence_penalty": (0.5, "presence_penalty", 0.5),
    "frequency_penalty": (0.5, "frequency_penalty", 0.5),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_obeyed(option: str) -> None:
    value, name, expected = OPTIONS[option]
    assert getattr(sampling(**{option: value}), name) == expected
    assert getattr(sampling(), name) != expected
    raw = generate(raw=True, options={option: value}).translate().to_sampling_params(VOCAB)
    assert getattr(raw, name) == expected


@pytest.mark.parametrize("endless", [-1, -2, None])
def test_num_predict_without_end_is_as_many_as_fit(endless: int | None) -> None:
    assert sampling(num_predict=endless).max_tokens is None
    assert generate(raw=True, options={"num_predict": endless}).translate().to_sampling_params(VOCAB).max_tokens is None


def test_a_window_of_no_tokens_has_no_penalties() -> None:
    found = sampling(repeat_last_n=0, repeat_penalty=1.5, presence_penalty=1.0, frequency_penalty=1.0)
    assert (found.repetition_penalty, found.presence_penalty, found.frequency_penalty) == (1.0, 0.0, 0.0)
    assert sampling(repeat_last_n=-1, repeat_penalty=1.5).repetition_penalty == 1.5


def test_options_without_effect_are_named() -> None:
    given = chat(options={"num_gpu": 1, "num_thread": 2, "repeat_last_n": 64, "temperature": 1.0}, shift=True)
    assert given.left_out.fields == ("shift", "options.num_gpu", "options.num_thread", "options.repeat_last_n")
    assert chat(options={"repeat_last_n": -1, "num_ctx": 10}).left_out.fields == ()
    assert generate(raw=True, reasoning_effort="low").left_out.fields == ("reasoning_effort",)
    embedding = parse_body(EmbedRequest, b'{"input": "a", "options": {"num_ctx": 10, "seed": 1, "num_gpu": 1}}')
    assert embedding.left_out.fields == ("options.seed", "options.num_gpu")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"options": {"temperature": 9}}, "options.temperature", "[0.0, 2.0], got 9"),
        ({"options": {"temperature": "hot"}}, "options.temperature", "a number"),
        ({"options": {"num_predict": 0}}, "options.num_predict", "at least 1"),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty", "options.repeat_penalty must be in"),
        ({"options": {"typical_p": 0.5}}, "options.typical_p", "send 1"),
        ({"options": {"mirostat": 2}}, "options.mirostat", "send 0"),
        ({"format": "xml"}, "format", "json or a JSON Schema"),
        ({"think": "much"}, "think", "low, medium, high"),
        ({"keep_alive": "soon"}, "keep_alive", '"1h30m"'),
        ({"messages": [{**USER, "images": ["AAAA"]}]}, "messages.0.images", "not supported"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages", ""),
        ({"tools": [TOOL, TOOL]}, "tools", "different names"),
    ],
)
def test_a_refusal_has_the_names_of_this_api(fields: dict[str, Any], param: str, words: str) -> None:
    error = refusal(**fields)
    assert (error.status, error.param) == (400, param)
    assert words in error.message


@pytest.mark.parametrize(
    "fields", [{"suffix": "b"}, {"template": "t"}, {"context": [1]}, {"images": ["AAAA"]}, {"raw": True, "system": "s"}]
)
def test_generate_refuses_by_name_what_it_cannot_do(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        generate(**fields)
    assert caught.value.param == list(fields)[-1]


def test_num_ctx_is_held_to_the_context_of_the_server() -> None:
    for given in (chat(options={"num_ctx": 4096}), generate(options={"num_ctx": 4096})):
        given.check_model(4096, can_think=False)
        with pytest.raises(InvalidRequest, match="at most 4095"):
            given.check_model(4095, can_think=False)


def test_thinking_is_asked_of_a_model_that_can() -> None:
    for asked in (True, "low"):
        with pytest.raises(InvalidRequest, match="does not support thinking"):
            chat(think=asked).check_model(10, can_think=False)
        chat(think=asked).check_model(10, can_think=True)
    chat(think=False).check_model(10, can_think=False)
    assert chat().translate().template_variables() == {}
    assert chat(think=True).translate().template_variables() == {"enable_thinking": True}
    assert chat(think="low").translate().template_variables() == {"enable_thinking": True, "reasoning_effort": "low"}
    assert chat(think=False).translate().template_variables() == {"enable_thinking": False, "reasoning_effort": "none"}


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(5, 5), (-1, -1), ("5m", 300), ("1h30m", 5400), ("-1m", -60), ("0", 0), ("250ms", 0.25), ("1.5h", 5400)],
)
def test_keep_alive_is_seconds_or_a_duration(given: Any, seconds: float) -> None:
    assert chat(keep_alive=given).keep_alive == pytest.approx(seconds)


def test_format_is_any_json_or_a_schema() -> None:
    assert chat(format="").translate().structured_output()[1] is None
    for form, kind in (
        ("json", StructuredOutputKind.JSON_OBJECT),
        ({"type": "null"}, StructuredOutputKind.JSON_SCHEMA),
    ):
        for made in (chat(format=form), generate(format=form), generate(raw=True, format=form)):
            found = made.translate().structured_output()[1]
            assert found is not None
            assert found.kind == kind


def test_a_conversation_with_tools_gets_the_ids_that_templates_want() -> None:
    call = {"function": {"name": "look", "arguments": {"at": 1}}}
    other = {"function": {"name": "find", "arguments": {}}}
    translated = chat(
        messages=[
            {"role": "system", "content": "s"},
            USER,
            {"role": "assistant", "thinking": "Hm.", "tool_calls": [call, other]},
            {"role": "tool", "tool_name": "find", "content": "found"},
            {"role": "tool", "content": "looked"},
        ],
        tools=[TOOL],
    ).translate()
    shown = translated.messages_for_template()
    assert shown[2]["reasoning"] == "Hm."
    first, second = shown[2]["tool_calls"]
    assert first["function"] == {"name": "look", "arguments": {"at": 1}}
    assert [each["tool_call_id"] for each in shown[3:]] == [second["id"], first["id"]]
    assert translated.tool_use is not None


def test_an_answer_that_has_begun_is_continued() -> None:
    begun = chat(messages=[USER, {"role": "assistant", "content": "Well,"}]).translate()
    assert (begun.continue_final_message, begun.add_generation_prompt) == (True, False)
    assert not chat().translate().continue_final_message


def test_a_prompt_is_a_turn_or_with_raw_a_text() -> None:
    turn, text = generate(system="s").translate(), generate(raw=True).translate()
    assert isinstance(turn, OllamaChat)
    assert [(each.role, each.content) for each in turn.messages] == [("system", "s"), ("user", "Hello")]
    assert isinstance(text, RawCompletion)
    assert text.prompts(VOCAB) == ["Hello"]
    assert (chat().stream, chat(stream=False).translate().stream, turn.stream, text.stream) == (True, False, True, True)


def test_logprobs_are_those_of_chat() -> None:
    for make in (chat, generate, lambda **fields: generate(raw=True, **fields)):
        assert make().translate().to_sampling_params(VOCAB).logprobs is None
        assert make(logprobs=True).translate().to_sampling_params(VOCAB).logprobs == 0
        assert make(logprobs=True, top_logprobs=3).translate().to_sampling_params(VOCAB).logprobs == 3


def test_a_request_without_a_prompt_only_loads() -> None:
    assert parse_body(OllamaChatRequest, b'{"model": "m"}').only_loads
    assert parse_body(GenerateRequest, b'{"model": "m"}').only_loads
    assert not chat().only_loads
    assert not generate().only_loads


def test_embeddings_are_cut_at_the_end_unless_refused() -> None:
    cut = parse_body(EmbedRequest, b'{"input": ["a"], "dimensions": 3}').translate()
    assert (cut.truncate_prompt_tokens, cut.truncation_side, cut.input, cut.dimensions) == (-1, "right", ["a"], 3)
    assert parse_body(EmbedRequest, b'{"input": "a", "truncate": false}').translate().truncate_prompt_tokens is None
    assert parse_body(PromptEmbedRequest, b'{"prompt": "b"}').translate().input == "b"


def test_a_model_goes_by_either_name() -> None:
    for body in (b'{"name": "a/b"}', b'{"model": "a/b"}'):
        assert parse_body(NamedModelRequest, body).named == "a/b"
