"""The shapes of Anthropic's answers; see `protocol.answers`."""

from __future__ import annotations

from typing import Any, Literal

from protocol.answers import OpenAnswer


class AnthropicErrorObject(OpenAnswer):
    type: str
    message: str


class AnthropicError(OpenAnswer):
    """The body of an error on Anthropic's routes."""

    type: Literal["error"]
    error: AnthropicErrorObject


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
