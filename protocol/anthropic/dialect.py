"""The dialect's record, /v1/models for its clients, and the shapes of its answers; see `protocol.answers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from protocol.answers import OpenAnswer, event_frame
from protocol.anthropic.messages import CountTokensRequest, MessagesRequest, envelope, error_body
from protocol.anthropic.output import MessageBodyWriter, MessageStreamWriter
from protocol.body import page_body, page_size
from protocol.errors import ApiError, shown
from protocol.operations import Dialect, GenerationRoute

DEFAULT_LISTED = 20
MAX_LISTED = 1000

_CURSORS = ("after_id", "before_id")


def model_info(name: str, *, created: int, max_model_len: int | None) -> dict[str, Any]:
    """Return one model. Prompt and answer share the context of `max_model_len` tokens, so each is limited to it;
    None: it was not loaded yet."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
        "lifecycle": "active",
        "deprecated_at": None,
        "retires_at": None,
        "line": None,
        "capabilities": None,
    }


def model_page(infos: Sequence[dict[str, Any]], query: Mapping[str, Sequence[str]]) -> bytes:
    """Return a page of models: `limit` of them after `after_id` or before `before_id`, only of the named `lifecycle`.

    Raises `ApiError` 400 for a wrong query.
    """
    limit = page_size(query.get("limit", (str(DEFAULT_LISTED),))[-1], MAX_LISTED)
    if len(given := [name for name in _CURSORS if name in query]) > 1:
        raise ApiError(400, "after_id and before_id exclude each other; send one of them.", param="before_id")
    ids = [info["id"] for info in infos]
    start, end = 0, len(ids)
    for name in given:
        if query[name][-1] not in ids:
            raise ApiError(
                400, f"{name} must be the id of one of the models, got {shown(query[name][-1])}.", param=name
            )
        place = ids.index(query[name][-1])
        start, end = (place + 1, end) if name == "after_id" else (0, place)
    stages = [*query.get("lifecycle", ()), *query.get("lifecycle[]", ())]
    found = [info for info in infos[start:end] if not stages or info["lifecycle"] in stages]
    page = found[-limit:] if "before_id" in given else found[:limit]
    return page_body(page, has_more=len(page) < len(found))


class AnthropicErrorObject(OpenAnswer):
    type: str
    message: str


class AnthropicError(OpenAnswer):
    type: Literal["error"]
    error: AnthropicErrorObject


class Message(OpenAnswer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[dict[str, Any]]
    model: str
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]


_MESSAGES = GenerationRoute(
    path="/v1/messages",
    summary="Answer a conversation, as Anthropic's API does.",
    request=MessagesRequest,
    answer=Message,
    id_prefix="msg_",
    stream_writer=MessageStreamWriter,
    body_writer=MessageBodyWriter,
)

ANTHROPIC = Dialect(
    root="/v1/messages",
    more_roots=("/v1/complete",),
    generation=(_MESSAGES,),
    counting={"/v1/messages/count_tokens": CountTokensRequest},
    error_body=error_body,
    error_event=lambda error, request_id: event_frame("error", envelope(error, request_id)),
    error_answer=AnthropicError,
    request_id_header=b"request-id",
    shared_roots=("/v1/models",),
    client_header="anthropic-version",
)
