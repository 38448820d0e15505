"""Sampling that a request leaves open is the model's; what the client says wins, in every dialect."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from engine.messages import SamplingParams
from protocol.anthropic.messages import MessagesRequest
from protocol.body import parse_body
from protocol.openai.chat import ChatCompletionRequest
from protocol.openai.completions import CompletionRequest
from protocol.openai.generation import GenerationRequest
from protocol.request_fields import RequestFields
from protocol.responses.request import ResponsesRequest

MODELS = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
MODELS |= {"presence_penalty": 0.5, "frequency_penalty": 0.25}
SPOKEN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
SPOKEN |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
USER = {"role": "user", "content": "Hi"}
DIALECTS: dict[type[RequestFields], dict[str, Any]] = {
    ChatCompletionRequest: {"messages": [USER]},
    CompletionRequest: {"prompt": "Hi"},
    ResponsesRequest: {"input": "Hi"},
    MessagesRequest: {"messages": [USER], "max_tokens": 8},
}


def sampling(dialect: type[RequestFields], defaults: dict[str, Any], **fields: Any) -> SamplingParams:
    given = parse_body(dialect, orjson.dumps(DIALECTS[dialect] | fields))
    given.fill_in(defaults)
    body = given.translate()
    assert isinstance(body, GenerationRequest)
    body.fill_in(defaults)
    return body.to_sampling_params(1000)


def of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in MODELS}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_is_left_open_is_the_models(dialect):
    assert of(sampling(dialect, MODELS)) == MODELS
    assert of(sampling(dialect, MODELS, **dict.fromkeys(MODELS))) == MODELS  # null is left open
    assert of(sampling(dialect, MODELS, temperature=0.3)) == MODELS | {"temperature": 0.3}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_the_client_says_wins_also_where_it_is_openais_default(dialect):
    assert of(sampling(dialect, MODELS, **SPOKEN)) == SPOKEN
    assert of(sampling(dialect, SPOKEN)) == SPOKEN


def test_a_length_is_the_models_unless_the_client_or_the_api_has_one():
    most = MODELS | {"max_tokens": 100}
    assert sampling(ChatCompletionRequest, most).max_tokens == 100
    assert sampling(ResponsesRequest, most).max_tokens == 100
    assert sampling(CompletionRequest, most).max_tokens == 16  # which is OpenAI's
    assert sampling(MessagesRequest, most).max_tokens == 8
    assert sampling(ChatCompletionRequest, most, max_completion_tokens=7).max_tokens == 7
    assert sampling(ChatCompletionRequest, most, max_tokens=-1).max_tokens is None
    assert sampling(ResponsesRequest, most, max_output_tokens=7).max_tokens == 7


def test_a_response_tells_what_it_was_sampled_with():
    body = parse_body(ResponsesRequest, orjson.dumps(DIALECTS[ResponsesRequest] | {"top_p": 0.5}))
    body.fill_in(MODELS | {"max_tokens": 100})
    assert (body.echo()["temperature"], body.echo()["top_p"]) == (0.6, 0.5)
