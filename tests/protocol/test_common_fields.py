"""Every field of the common request is obeyed, refused by name or warned of, in every dialect."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from engine.errors import InvalidRequest
from protocol.anthropic.messages import CountTokensRequest, MessagesRequest
from protocol.body import parse_body
from protocol.errors import ApiError, to_api_error
from protocol.ollama.requests import GenerateRequest, OllamaChatRequest
from protocol.openai.chat import ChatCompletionRequest
from protocol.openai.completions import CompletionRequest
from protocol.openai.embeddings import EmbeddingRequest
from protocol.request_fields import RequestFields
from protocol.responses.request import InputTokensRequest, ResponsesRequest

USER = {"role": "user", "content": "Hello"}
ASSISTANT = {"role": "assistant", "content": "Good"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

BODIES: dict[type[RequestFields], dict[str, Any]] = {
    ChatCompletionRequest: {"messages": [USER, ASSISTANT]},
    CompletionRequest: {"prompt": "Hello"},
    MessagesRequest: {"messages": [USER, ASSISTANT], "max_tokens": 5},
    ResponsesRequest: {"input": [USER, ASSISTANT]},
    OllamaChatRequest: {"messages": [USER, ASSISTANT]},
    GenerateRequest: {"prompt": "Hello"},
}
TO_CONTINUE = (MessagesRequest, OllamaChatRequest)  # which continue the assistant's message by default

# A value of each field that is not its default, with the fields that it needs.
VALUES: dict[str, Any] = {
    "add_generation_prompt": False,
    "add_special_tokens": None,  # the opposite of the default, which is not the same everywhere
    "allowed_token_ids": [5],
    "audio": {"voice": "a"},
    "bad_words": ["no"],
    "best_of": 2,
    "cache_salt": "s",
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"a": 1},
    "continue_final_message": True,
    "deterministic": "banana",
    "documents": [{"text": "a"}],
    "dry_multiplier": 0.5,
    "dynatemp_range": 0.3,
    "ebnf": 'root ::= "a"',
    "echo": True,
    "frequency_penalty": 0.5,
    "function_call": "auto",
    "functions": [{"name": "look"}],
    "grammar": 'root ::= "a"',
    "guided_choice": ["a"],
    "guided_grammar": 'root ::= "a"',
    "guided_json": {"type": "object"},
    "guided_json_object": True,
    "guided_regex": "a+",
    "guided_whitespace_pattern": {"guided_whitespace_pattern": " ", "guided_json": {"type": "object"}},
    "ignore_eos": True,
    "include_reasoning": False,
    "include_stop_str_in_output": True,
    "json_schema": {"type": "object"},
    "kv_transfer_params": {"a": 1},
    "length_penalty": 0.5,
    "logit_bias": {"5": 1},
    "logprob_token_ids": [5],
    "logprobs": True,
    "lora_path": "a",
    "max_completion_tokens": 3,
    "max_tokens": 3,
    "min_p": 0.5,
    "min_tokens": 2,
    "mirostat": 1,
    "mm_processor_kwargs": {"a": 1},
    "modalities": ["audio"],
    "model": "m",
    "n": 2,
    "no_stop_trim": True,
    "parallel_tool_calls": False,
    "presence_penalty": 0.5,
    "priority": 3,
    "prompt_embeds": "a",
    "prompt_logprobs": 2,
    "reasoning_effort": "high",
    "regex": "a+",
    "repetition_detection": {"a": 1},
    "repetition_penalty": 1.5,
    "request_id": "r-1",
    "response_format": {"type": "json_object"},
    "return_prompt_text": True,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "seed": 5,
    "service_tier": "auto",
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stop": "a",
    "stop_regex": "a",
    "stop_token_ids": [5],
    "stream": True,
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "structured_outputs": {"regex": "a+"},
    "suffix": "a",
    "temperature": 0.5,
    "thinking_token_budget": 5,
    "timeout": 5.0,
    "tool_choice": {"tools": [TOOL], "tool_choice": "required"},
    "tools": [TOOL],
    "top_k": 5,
    "top_logprobs": 2,
    "top_n_sigma": 1.0,
    "top_p": 0.5,
    "truncate_prompt_tokens": 5,
    "truncation_side": "right",
    "ttft_timeout": 5.0,
    "typical_p": 0.5,
    "use_beam_search": True,
    "vllm_xargs": {"a": 1},
    "web_search_options": {},
    "xtc_probability": 0.5,
}
# Fields that this server does not know, as other servers' clients send them.
FOREIGN = {"context_management": {"edits": []}, "mirostat_tau": 4.0, "dynatemp_exponent": 2.0, "of_tomorrow": 1}

# `None` stands for null, which is no value. These have the dialect's own form, or are the conversation.
OWN = {"messages", "prompt", "tools", "tool_choice"}


def fields_of(model: type[RequestFields], name: str, value: Any) -> dict[str, Any]:
    if name == "add_special_tokens":
        return {name: not model.model_fields[name].default}
    if name in ("add_generation_prompt", "continue_final_message") and model in TO_CONTINUE:
        return {name: not value}
    if name == "stream" and model.model_fields[name].default is not False:
        return {name: False}
    if name == "logprobs" and model is CompletionRequest:
        return {name: 2}
    if name in ("top_logprobs", "logprob_token_ids") and model is not ResponsesRequest:
        return {name: value, "logprobs": 2 if model is CompletionRequest else True}
    return value if isinstance(value, dict) and name in value else {name: value}


def outcome(model: type[RequestFields], name: str, value: Any) -> str:
    """Return what a dialect does with a field: "refused", "warned" or "obeyed"; fail if it does nothing."""
    fields = fields_of(model, name, value)
    body = {**BODIES[model], **fields}
    without = {key: each for key, each in body.items() if key != name or key in BODIES[model]} | {
        key: BODIES[model][key] for key in fields.keys() & BODIES[model].keys()
    }
    try:
        given = parse_body(model, orjson.dumps(body))
        chat = given.translate()
    except (ApiError, InvalidRequest) as refused:
        error = to_api_error(refused)
        assert error.status == 400
        assert error.param is not None
        assert error.param.split(".")[0] in fields, f"{model.__name__} blames {error.param} for {name}"
        return "refused"
    if name in (field.partition(" (did you mean")[0] for field in given.left_out.fields):
        assert name in (given.left_out.warning() or "")
        return "warned"
    if name == "web_search_options":
        assert given.left_out.tools == ("web_search",)
        return "warned"
    if name in model.labels:
        return "obeyed"  # nothing but a name, or what always comes
    before = parse_body(model, orjson.dumps(without)).translate()
    assert chat.model_dump() != before.model_dump(), f"{model.__name__} ignores {name}"
    return "obeyed"


def test_the_table_has_every_field() -> None:
    names = {
        name
        for model in (ChatCompletionRequest, CompletionRequest)
        for name in (*model.model_fields, *model.unsupported)
    }
    assert names - OWN == VALUES.keys() - OWN


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_a_common_field_is_obeyed_refused_or_warned_of(model: type[RequestFields]) -> None:
    found = {name: outcome(model, name, value) for name, value in VALUES.items() if name not in OWN}
    found |= {name: outcome(model, name, value) for name, value in FOREIGN.items()}
    assert set(found.values()) == {"obeyed", "refused", "warned"}
    assert all(found[name] == "warned" for name in FOREIGN)
    for name in ("cache_salt", "regex", "ebnf", "grammar", "json_schema", "guided_json_object", "bad_words"):
        assert found[name] == "obeyed"
    for name in ("mirostat", "top_n_sigma", "dynatemp_range", "deterministic", "use_beam_search", "prompt_embeds"):
        assert found[name] == "refused"


@pytest.mark.parametrize(
    "model",
    [MessagesRequest, ResponsesRequest, CountTokensRequest, InputTokensRequest, OllamaChatRequest, GenerateRequest],
)
def test_a_dialect_refuses_what_chat_refuses(model: type[RequestFields]) -> None:
    assert ChatCompletionRequest.unsupported.keys() - model.model_fields.keys() <= model.unsupported.keys()


def test_a_warning_names_no_byte_that_a_client_made_up() -> None:
    body = {"messages": [USER], "a\r\nb": 1, "ä": 1, "x" * 100: 1, "fine": 1, "empty": None}
    warning = parse_body(ChatCompletionRequest, orjson.dumps(body)).left_out.warning()
    assert warning == "fields without effect: other, fine (this server does not use them)"


def test_labels_bring_no_warning() -> None:
    labels = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k"}
    for model, body in BODIES.items():
        assert parse_body(model, orjson.dumps(body | labels)).left_out.warning() is None


def test_embeddings_warn_of_fields_without_effect() -> None:
    body = parse_body(EmbeddingRequest, orjson.dumps({"input": "a", "user": "u", "prompt_style": "b"}))
    assert body.without_effect == ("prompt_style",)
