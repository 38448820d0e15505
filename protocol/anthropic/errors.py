"""Anthropic's envelope of errors: `{"type": "error", "error": {"type", "message"}, "request_id"}`."""

from __future__ import annotations

from typing import Any

import orjson

from protocol.errors import ApiError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

THREADS_UNSUPPORTED = "thread_unsupported_request"
"""The code of a refusal at which Anthropic's SDKs send the whole conversation instead."""

_CODES = (THREADS_UNSUPPORTED,)  # those of ours that are Anthropic's, too


def envelope(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """The error in Anthropic's words. It has no place for `param`; the message names the field."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    told = {"type": kind, "message": error.message}
    details = {"details": {"error_code": error.code}} if error.code in _CODES else {}
    return {"type": "error", "error": {**told, **details}, "request_id": request_id}


def error_body(error: ApiError, request_id: str | None = None) -> bytes:
    """The envelope as JSON."""
    return orjson.dumps(envelope(error, request_id))
