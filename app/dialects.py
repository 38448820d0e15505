"""Which wire format a path speaks, for what is answered before or outside its handler: errors and headers."""

from __future__ import annotations

from protocol import anthropic
from protocol.errors import ApiError

_ANTHROPIC = "/v1/messages"


def error_body(path: str, error: ApiError, request_id: str | None = None) -> bytes:
    """The body of an error answer on `path`. Every path but Anthropic's has OpenAI's envelope."""
    return anthropic.error_body(error, request_id) if _is_anthropic(path) else error.body()


def request_id_headers(path: str, request_id: str) -> list[tuple[bytes, bytes]]:
    """How an answer on `path` names the request; Anthropic's SDKs read a header of their own."""
    value = request_id.encode()
    own = [(b"request-id", value)] if _is_anthropic(path) else []
    return [(b"x-request-id", value), *own]


def _is_anthropic(path: str) -> bool:
    return path == _ANTHROPIC or path.startswith(_ANTHROPIC + "/")
