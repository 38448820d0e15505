"""Every failure that a client can see, as one value: an HTTP status and OpenAI's error envelope.

1. Messages name the field in the client's words (``messages.0.content``), the value and what is allowed.
2. They never carry prompt text: a string comes back only where a fixed word was expected, and only if it is short.
3. The text of an unexpected exception stays on the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from json import JSONDecodeError  # orjson.JSONDecodeError is a subclass
from typing import Any

import orjson
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from engine.errors import EngineDead, EngineNotReady, InvalidRequest, RequestFailed

TAG_PREFIX = "$"
"""Union tags in request models start with this, so that they can be dropped from a field's path."""

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_MAX_SHOWN = 40  # characters of a client's value that an error repeats


class ApiError(Exception):
    """A failure as the client sees it: `status` and `headers` of the response, the rest in its body.

    `type` defaults to OpenAI's word for the status, `param` is the path of the wrong field, `code` a word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,  # noqa: A002 - the wire's name
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.param = param
        self.code = code
        self.headers: Mapping[str, str] = dict(headers or {})

    def envelope(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        return orjson.dumps(self.envelope())


def deadline_exceeded(what: str) -> ApiError:
    """Return the error of a request that ran out of its time: 504, because 408 means that the client sent too slowly.

    SDKs retry both; the header asks them not to, because a retry would run out of time again.
    """
    return ApiError(
        504, f"{what} Ask for more time or for less.", code="deadline_exceeded", headers={"x-should-retry": "false"}
    )


def to_api_error(exc: Exception) -> ApiError:
    """Return the client's error for `exc`: a bare 500 for an unexpected exception. Never raises."""
    match exc:
        case ApiError():
            return exc
        case InvalidRequest():
            return ApiError(400, str(exc), param=exc.param, code=exc.code)
        case ValidationError():
            return _from_validation_error(exc)
        case JSONDecodeError():
            return _from_json_error(exc)
        case RequestFailed():
            return ApiError(500, "The request failed inside the server. It may be sent again.", code="request_failed")
        case EngineNotReady():
            return ApiError(503, "The model is still being loaded.", code="model_loading", headers={"retry-after": "2"})
        case EngineDead():
            return ApiError(503, "The engine of this server has stopped; the server is restarting.", code="engine_dead")
        case _:
            return ApiError(500, "The server met an unexpected error.", code="internal_error")


def _from_json_error(exc: JSONDecodeError) -> ApiError:
    # exc.msg is one of the parser's fixed phrases; exc.doc is the client's text and stays here.
    where = f"line {exc.lineno}, column {exc.colno}"
    return ApiError(400, f"The request body is not valid JSON: {exc.msg} at {where}.", code="invalid_json")


def _from_validation_error(exc: ValidationError) -> ApiError:
    # The first error only: the envelope has room for one `param`, and the later ones often follow from it.
    error = exc.errors(include_url=False)[0]
    path = _client_path(error)
    return ApiError(400, _sentence(error, path or "The request body"), param=path or None)


def _client_path(error: ErrorDetails) -> str:
    parts = [str(part) for part in error["loc"]]
    field = error.get("ctx", {}).get("field")  # set by rules that look at a whole object
    if field is not None:
        parts.append(str(field))
    return ".".join(part for part in parts if not part.startswith(TAG_PREFIX))


_SECRET = [(), *((name,) for name in ("messages", "prompt", "cache_salt", "query", "documents", "text_1", "text_2"))]
_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "string_unicode": "valid Unicode text",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "greater_than": "more than {gt}",
    "string_pattern_mismatch": "text that matches {pattern}",
    "too_short": "an array of at least {min_length}",
}


def _sentence(error: ErrorDetails, path: str) -> str:
    kind, given = error["type"], error["input"]
    if kind == "missing":
        return f"{path} is required."
    if kind == "rule":  # our own, worded where it is written
        return f"{path} {error['msg']}."
    expected = error["msg"] if kind == "shape" else _EXPECTED.get(kind)  # ours, for several JSON types
    if expected is None:
        return f"{path} is not valid: {error['msg']}."
    secret = error["loc"][:1] in _SECRET and kind != "literal_error"
    expected = expected if kind == "shape" else expected.format(**error.get("ctx", {}))
    return f"{path} must be {expected}, got {shown(given, secret)}."


def shown(value: Any, secret: bool = False) -> str:
    """Return a client's value in the form in which an error may repeat it."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return str(value)[:_MAX_SHOWN]
        case str():
            if secret or len(value) > _MAX_SHOWN:
                return f"a string of {len(value)} characters"
            return repr(value)
        case list():
            return f"an array of {len(value)}"
        case dict():
            return "an object"
        case _:
            return f"a value of type {type(value).__name__}"
