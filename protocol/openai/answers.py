"""The shapes of OpenAI's whole answers. Writers set the fields; the rest is null."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import UNSET, UnsetType, field

from protocol.answers import Answer

FinishReasonName = Literal["stop", "length", "tool_calls", "function_call", "abort"]


class PromptTokensDetails(Answer):
    """`cached_tokens`: found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Answer):
    reasoning_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None


class LikelyToken(Answer):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(LikelyToken):
    """One generated token; `bytes` are its UTF-8, which need not be whole characters."""

    top_logprobs: list[LikelyToken]


class ChatLogprobsObject(Answer):
    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobsObject(Answer):
    """Four parallel arrays. The first token of an echoed prompt has nulls."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptToken(Answer):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]


class FunctionText(Answer):
    """`arguments` is JSON text."""

    name: str
    arguments: str


class ToolCallObject(Answer, tag_field="type", tag="function"):
    id: str
    function: FunctionText


class CustomText(Answer):
    """`input` is free text."""

    name: str
    input: str


class CustomToolCallObject(Answer, tag_field="type", tag="custom"):
    id: str
    custom: CustomText


class AssistantMessage(Answer):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: FunctionText | None = None  # the one call, if the request had functions instead of tools
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallObject | CustomToolCallObject] | UnsetType = UNSET


class ChatChoice(Answer, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobsObject | None
    finish_reason: FinishReasonName
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(Answer, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None
    service_tier: Literal["default"] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: None = None


class CompletionChoice(Answer, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobsObject | None
    finish_reason: FinishReasonName
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Completion(Answer, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str | None
    service_tier: Literal["default"] | None = None
    kv_transfer_params: None = None


class Embedding(Answer, kw_only=True):
    """`embedding` is an array of numbers, or base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Answer):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PrefillAnswer(Answer, kw_only=True):
    """The fields of answers that need no generated text."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: EmbeddingUsage


class EmbeddingList(PrefillAnswer, kw_only=True):
    data: list[Embedding]


class ModelCard(Answer, kw_only=True):
    """One model. `root` is the name of its weights, `max_model_len` counts tokens; both are None before it was loaded
    for the first time. `memory` counts the bytes that a loaded one takes, where there are several models.

    `default_parameters`, as in OpenRouter's cards, are for requests that set no sampling; a client adds
    `chat_parameters` if a person talks to the model.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "headrace"
    root: str | None
    parent: str | None = None
    max_model_len: int | None
    status: Literal["unloaded", "loading", "loaded", "unloading", "failed"]
    memory: int | None
    default_parameters: Mapping[str, float | None]
    chat_parameters: Mapping[str, float]
    permission: list[Any] = field(default_factory=list)


class ModelList(Answer, kw_only=True):
    object: Literal["list"] = "list"
    data: Sequence[ModelCard]
