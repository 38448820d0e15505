"""The shapes of OpenAI's answers; see `protocol.answers`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from protocol.answers import Answer


class PromptTokensDetails(Answer):
    """`cached_tokens`: found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Answer):
    reasoning_tokens: int


class Usage(Answer):
    """Tokens of one request."""

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


class FunctionCall(Answer):
    """`arguments` is JSON text."""

    name: str
    arguments: str


class ToolCallObject(Answer):
    id: str
    type: Literal["function"]
    function: FunctionCall


class CustomInput(Answer):
    """`input` is free text."""

    name: str
    input: str


class CustomToolCallObject(Answer):
    id: str
    type: Literal["custom"]
    custom: CustomInput


class AssistantMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: None
    audio: None
    function_call: FunctionCall | None  # the one call, if the request had functions instead of tools
    reasoning: str | None
    reasoning_content: str | None
    tool_calls: list[ToolCallObject | CustomToolCallObject] = Field(default_factory=list)


FinishReasonName = Literal["stop", "length", "tool_calls", "function_call", "abort"]


class ChatChoice(Answer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobsObject | None
    finish_reason: FinishReasonName
    stop_reason: int | str | None
    token_ids: list[int] | None


class ChatCompletion(Answer):
    """The whole answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: Literal["default"] | None
    system_fingerprint: str | None
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    kv_transfer_params: None


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobsObject | None
    finish_reason: FinishReasonName
    stop_reason: int | str | None
    token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None


class Completion(Answer):
    """The whole answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: Literal["default"] | None
    system_fingerprint: str | None
    kv_transfer_params: None


class Embedding(Answer):
    """`embedding` is an array of numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Answer):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingList(Answer):
    """The answer of POST /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    default_parameters: dict[str, float | None]
    chat_parameters: dict[str, float]
    permission: list[Any]


class ModelList(Answer):
    """The answer of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]
