"""The dialect's record, and the shapes of its answers; see `protocol.answers`."""

from __future__ import annotations

from typing import Any, Literal

from protocol.answers import InputTokens, OpenAnswer, event_frame
from protocol.errors import ApiError
from protocol.operations import Dialect, asks, finds, generates
from protocol.responses.request import InputTokensRequest, ResponsesRequest


class ResponseObject(OpenAnswer):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "cancelled", "queued", "in_progress"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class DeletedResponse(OpenAnswer):
    id: str
    deleted: bool


class ItemList(OpenAnswer):
    object: Literal["list"]
    data: list[dict[str, Any]]


_COUNT = "Count the tokens that a response would read."


def _error_event(error: ApiError, request_id: str | None) -> bytes:
    fields = {"code": error.code, "message": error.message, "param": error.param, "sequence_number": 0}
    return event_frame("error", {"type": "error", **fields})


RESPONSES = Dialect(
    root="/v1/responses",
    error_event=_error_event,
    others=(
        generates("/v1/responses", "Answer items; a response can be continued.", ResponsesRequest, ResponseObject),
        asks("/v1/responses/input_tokens", _COUNT, InputTokens, InputTokensRequest),
        finds(
            "get",
            "/v1/responses/{id}",
            "A stored response, or one in progress.",
            ResponseObject,
            streams=True,
            query={
                "stream": {"type": "boolean", "default": False},
                "starting_after": {"type": "integer", "minimum": -1, "description": "Events after this number."},
                "include": {"type": "array", "items": {"type": "string"}, "description": "Without effect."},
            },
        ),
        finds("delete", "/v1/responses/{id}", "Delete a stored response.", DeletedResponse),
        finds("post", "/v1/responses/{id}/cancel", "Cancel a response in progress.", ResponseObject),
        finds("get", "/v1/responses/{id}/input_items", "The input items of a response.", ItemList),
    ),
)
