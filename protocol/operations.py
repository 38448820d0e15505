"""Every route as clients see it, in the order in which /docs shows them.

A test compares this table with the routes that the application has.
"""

from __future__ import annotations

from pydantic import BaseModel

from protocol import answers
from protocol.administration import AbortRequest, ConfigureLogging
from protocol.dialect import Method, Operation, asks, finds
from protocol.dialects import DIALECTS
from protocol.tokens import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest

_TOKENIZE = "The token ids of a text, or of a conversation."


def _probe(path: str, summary: str, answer: type[BaseModel] | None, method: Method = "get") -> Operation:
    return Operation(method, path, summary, answer, also=(503,), is_open=True)


OPERATIONS = (
    *(operation for dialect in DIALECTS for operation in dialect.operations),
    asks("/tokenize", _TOKENIZE, answers.Tokens, TokenizeTextRequest, TokenizeChatRequest),
    asks("/v1/tokenize", _TOKENIZE, answers.Tokens, TokenizeTextRequest, TokenizeChatRequest),
    asks("/detokenize", "The text of token ids.", answers.Detokenized, DetokenizeRequest),
    asks("/v1/detokenize", "The text of token ids.", answers.Detokenized, DetokenizeRequest),
    finds("get", "/v1/requests/{id}/timeline", "What happened to one of the last requests.", answers.Timeline),
    _probe("/livez", "Is the process worth keeping?", answers.Alive),
    _probe("/readyz", "Would a request be accepted now?", answers.Status),
    _probe("/startupz", "Is the model loaded?", answers.Status),
    _probe("/health", "As /readyz, without a body.", None),
    _probe("/ping", "As /readyz, without a body.", None),
    _probe("/ping", "As /readyz, without a body.", None, "post"),
    Operation("get", "/load", "How many requests are being answered.", answers.Load),
    Operation("get", "/version", "The server's version.", answers.Version),
    Operation("get", "/metrics", "Figures for Prometheus.", "text/plain"),
    Operation("get", "/openapi.json", "This description, for programs.", "application/json"),
    Operation("get", "/docs", "This description, for people.", "text/html", is_open=True),
    Operation("get", "/dashboard", "What the server does, and a chat, for people.", "text/html", is_open=True),
)

OF_PAGES = frozenset(
    {"/", "/docs/files/{name}", "/dashboard/files/{name}", "/dashboard/frames", "/dashboard/simulation"}
)
"""Routes that are the pages' own: they change with them."""

TOKENIZER_INFO = (Operation("get", "/tokenizer_info", "The tokenizer's configuration.", answers.TokenizerInfo),)
"""Where the setting `enable_tokenizer_info_endpoint` is on."""

ADMINISTRATION = (
    Operation("get", "/server_info", "Version, model, engine info and settings.", answers.ServerInfo, errors=(503,)),
    Operation("get", "/engine_state", "What each engine does and holds.", answers.EngineState, errors=(503,)),
    Operation("post", "/reset_prefix_cache", "Forget what was computed.", answers.Success, errors=(503,)),
    Operation("post", "/start_profile", "Record what the next steps do.", answers.Success, errors=(400, 503)),
    Operation("post", "/stop_profile", "What was recorded, as a Chrome trace.", answers.Trace, errors=(409, 503)),
    Operation("post", "/abort_requests", "End requests by their ids.", answers.Aborted, [AbortRequest], (400, 413)),
    Operation("post", "/configure_logging", "Log more or less.", answers.LogLevel, [ConfigureLogging], (400, 413)),
)
"""Routes that exist where there are administrators' keys."""
