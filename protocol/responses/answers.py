"""The shapes of what the Responses API answers; see `protocol.answers`."""

from __future__ import annotations

from typing import Any, Literal

from protocol.answers import OpenAnswer


class ResponseObject(OpenAnswer):
    """A response of the Responses API."""

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
