"""The shapes of answers, for /openapi.json and for tests that hold the server to them.

Answers are written by hand where they are made, because that is on the path of every request; nothing here runs then.
Objects are closed: a key that is written and not named here is a mistake. The Responses API and Anthropic's Messages,
whose shapes their SDKs define, are described by what always is there.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """An object that the server sends."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class OpenAnswer(Answer):
    """One that may have more keys than are named."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


# --- errors


class ErrorObject(Answer):
    """What went wrong. `param` is the field at fault, `code` a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(Answer):
    """The body of every error, but for Anthropic's routes."""

    error: ErrorObject


class AnthropicErrorObject(OpenAnswer):
    type: str
    message: str


class AnthropicError(OpenAnswer):
    """The body of an error on Anthropic's routes."""

    type: Literal["error"]
    error: AnthropicErrorObject


# --- chat and completions


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


class AssistantMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: None
    audio: None
    function_call: None
    reasoning: str | None
    reasoning_content: str | None
    tool_calls: list[ToolCallObject] = []


FinishReasonName = Literal["stop", "length", "tool_calls", "abort"]


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
    service_tier: None
    system_fingerprint: None
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
    service_tier: None
    system_fingerprint: None
    kv_transfer_params: None


# --- embeddings and tokens


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


class Tokens(Answer):
    """The answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answer):
    """The answer of POST /detokenize."""

    prompt: str


# --- models and the server itself


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    permission: list[Any]


class ModelList(Answer):
    """The answer of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Version(Answer):
    version: str


class Load(Answer):
    """`server_load`: requests that are being answered."""

    server_load: int


class Alive(Answer):
    alive: bool


class Status(Answer):
    """How far the server is."""

    phase: Literal["starting", "ready", "stopping", "failed"]
    task: str | None
    done: int
    total: int | None
    elapsed_seconds: float


class ServerInfo(OpenAnswer):
    """The answer of GET /server_info."""

    version: str
    models: list[str]
    max_model_len: int
    vocab_size: int
    embedding_size: int


class EngineState(Answer):
    """The answer of GET /engine_state: a snapshot of each engine that lives, by its number."""

    engines: dict[str, dict[str, Any]]


class Success(Answer):
    success: bool


class Aborted(Answer):
    """`aborted`: how many requests had one of the ids."""

    aborted: int


class Timeline(OpenAnswer):
    """What happened to a request."""


# --- other dialects


class ResponseObject(OpenAnswer):
    """A response of the Responses API."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "cancelled", "in_progress"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class DeletedResponse(OpenAnswer):
    id: str
    deleted: bool


class ItemList(OpenAnswer):
    object: Literal["list"]
    data: list[dict[str, Any]]


class InputTokens(OpenAnswer):
    input_tokens: int


class Message(OpenAnswer):
    """A message of Anthropic's API."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[dict[str, Any]]
    model: str
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]
