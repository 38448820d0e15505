"""The table of dialects and routes, and the requests of tokenization and administration."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal

from msgspec import Struct
from pydantic import Field

from engine.errors import InvalidRequest
from protocol import answers
from protocol.anthropic.dialect import ANTHROPIC
from protocol.body import ClientModel, at_most, decode_json, fail_fast, validate
from protocol.ollama.dialect import OLLAMA
from protocol.openai.chat import ChatCompletionRequest
from protocol.openai.dialect import OPENAI
from protocol.operations import Dialect, Method, Operation, asks, finds
from protocol.request_fields import TruncatedPrompt
from protocol.responses.dialect import RESPONSES
from protocol.scoring.dialect import SCORING

MAX_TOKENS = 2**20  # tokens of one request


class TokenizeTextRequest(TruncatedPrompt):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ChatCompletionRequest):
    """The body of /tokenize for a conversation: the answer has the prompt of /v1/chat/completions."""

    return_token_strs: bool = False


class DetokenizeRequest(ClientModel):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], fail_fast, at_most(MAX_TOKENS, "tokens")]

    def check(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` for an id that the model does not have."""
        highest = max(self.tokens, default=0)
        if highest >= vocab_size:
            raise InvalidRequest(f"tokens must hold token ids in [0, {vocab_size - 1}], got {highest}.", param="tokens")


def parse_tokenize(body: bytes) -> TokenizeTextRequest | TokenizeChatRequest:
    """Return a checked body of /tokenize. Raises `ApiError` 400."""
    content = decode_json(body)
    is_chat = isinstance(content, dict) and content.get("messages") is not None
    return validate(TokenizeChatRequest, content) if is_chat else validate(TokenizeTextRequest, content)


DIALECTS = (OPENAI, RESPONSES, ANTHROPIC, OLLAMA, SCORING)

_ROOTS = [(root, dialect) for dialect in DIALECTS for root in (dialect.root, *dialect.more_roots)]
_BELOW = [(root + "/", dialect) for root, dialect in sorted(_ROOTS, key=lambda each: len(each[0]), reverse=True)]
_SHARED = [(root + "/", dialect) for dialect in DIALECTS for root in dialect.shared_roots]


def dialect_of(path: str, headers: Collection[str] = ()) -> Dialect:
    """Return the dialect with the longest root that `path` begins with, else OpenAI's. The route need not exist.

    For a path that two dialects share, the names of the request's headers, in lower case, decide.
    """
    path += "/"
    for root, dialect in _SHARED:
        if path.startswith(root) and dialect.client_header in headers:
            return dialect
    return next((dialect for root, dialect in _BELOW if path.startswith(root)), OPENAI)


MAX_ABORTED = 1024  # ids of one call


class AbortRequest(ClientModel):
    """The body of POST /abort_requests: ids from answers' header x-request-id, or from their bodies."""

    request_ids: Annotated[list[str], fail_fast, at_most(MAX_ABORTED, "ids")] = Field(min_length=1)


class ModelRequest(ClientModel):
    """The body of POST /v1/models/load and /v1/models/unload: the name of one of several models."""

    model: str


class ConfigureLogging(ClientModel):
    """The body of POST /configure_logging, named as in SGLang: the least severity that is logged."""

    log_level: Literal["debug", "info", "warning", "error"]


# ----------------------------------------------------------------------------------------------------------- operations
# Every route, in the order of /docs. A test compares this table with the routes of the application.


_TOKENIZE = "The token ids of a text, or of a conversation."
_TOKENIZED = (TokenizeTextRequest, TokenizeChatRequest)
_DETOKENIZE = "The text of token ids."


def _probe(path: str, summary: str, answer: type[Struct] | None, method: Method = "get") -> Operation:
    return Operation(method, path, summary, answer, also=(503,), is_open=True)


OPERATIONS = (
    *(operation for dialect in DIALECTS for operation in dialect.operations),
    *(asks(path, _TOKENIZE, answers.Tokens, *_TOKENIZED) for path in ("/tokenize", "/v1/tokenize")),
    *(asks(path, _DETOKENIZE, answers.Detokenized, DetokenizeRequest) for path in ("/detokenize", "/v1/detokenize")),
    finds("get", "/v1/requests/{id}/timeline", "What happened to one of the last requests.", answers.Timeline),
    _probe("/livez", "Liveness: 503 if the process has to be restarted.", answers.Alive),
    _probe("/readyz", "Readiness: 503 if a request would be refused now.", answers.Status),
    _probe("/startupz", "Start-up: 503 until the model is loaded.", answers.Status),
    _probe("/health", "As /readyz, without a body.", None),
    _probe("/ping", "As /readyz, without a body.", None),
    _probe("/ping", "As /readyz, without a body.", None, "post"),
    Operation("get", "/load", "Number of requests in progress.", answers.Load),
    Operation("get", "/version", "The server's version.", answers.Version),
    Operation("get", "/metrics", "Figures for Prometheus.", "text/plain"),
    Operation("get", "/openapi.json", "This description, for programs.", "application/json"),
    Operation("get", "/docs", "This description, for people.", "text/html", is_open=True),
    Operation("get", "/dashboard", "The dashboard: live figures and a chat.", "text/html", is_open=True),
)

OF_PAGES = frozenset(
    {"/", "/docs/files/{name}", "/dashboard/files/{name}"}
    | {f"/dashboard/{name}" for name in ("frames", "history", "simulation")}
)
"""Internal routes of the pages, which change with them."""

TOKENIZER_INFO = (Operation("get", "/tokenizer_info", "The tokenizer's configuration.", answers.TokenizerInfo),)
"""The route of the setting `enable_tokenizer_info_endpoint`."""

_MODEL = {"model": {"type": "string", "description": "One of several models. Default: all."}}
ADMINISTRATION = (
    Operation("get", "/server_info", "Version, model, engine info and settings.", answers.ServerInfo, errors=(503,)),
    Operation("get", "/engine_state", "What each engine does and holds.", answers.EngineState, errors=(503,)),
    Operation("post", "/reset_prefix_cache", "Empty the prefix cache.", answers.Success, errors=(503,)),
    Operation("post", "/start_profile", "Begin a profile of the next steps.", answers.Success, errors=(400, 503)),
    Operation("post", "/stop_profile", "The profile, as a Chrome trace.", answers.Trace, errors=(409, 503)),
    Operation("post", "/abort_requests", "End requests by their ids.", answers.Aborted, [AbortRequest], (400, 413)),
    Operation("post", "/v1/models/load", "Load a model.", answers.ModelStates, [ModelRequest], (400, 404, 413, 503)),
    Operation("post", "/v1/models/unload", "Unload it.", answers.ModelStates, [ModelRequest], (400, 404, 409, 413)),
    Operation("post", "/sleep", "Unload idle models.", answers.ModelStates, errors=(404, 409), query=_MODEL),
    Operation("post", "/wake_up", "Load what sleeps.", answers.ModelStates, errors=(404, 409, 503), query=_MODEL),
    Operation("post", "/configure_logging", "Change the log level.", answers.LogLevel, [ConfigureLogging], (400, 413)),
)
"""The routes of a server with administrators' keys."""
