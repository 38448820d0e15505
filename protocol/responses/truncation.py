"""`truncation: auto`: a conversation that is too long loses its oldest turns until it fits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from protocol.openai.chat import ChatMessage

_INSTRUCTIONS = ("system", "developer")

T = TypeVar("T")


def beginnings(messages: Sequence[ChatMessage]) -> list[int]:
    """Where a shorter conversation may begin: at any turn but the first, unless it is the result of a call."""
    turns = [place for place, message in enumerate(messages) if message.role not in _INSTRUCTIONS]
    return [place for place in turns[1:] if messages[place].role != "tool"]


def beginning_at(messages: Sequence[ChatMessage], begin: int) -> list[ChatMessage]:
    """The conversation from the message `begin` on. Instructions stay."""
    return [message for place, message in enumerate(messages) if place >= begin or message.role in _INSTRUCTIONS]


async def fit(messages: Sequence[ChatMessage], encode: Callable[[list[ChatMessage]], Awaitable[T | None]]) -> T | None:
    """What `encode` makes of as much of the conversation as fits; None if not even the last turn does.

    `encode` gives None for what is too long. It is asked for all of it, and then as often as a search by halves asks.
    """
    found = await encode(list(messages))
    if found is not None:
        return found
    begins = beginnings(messages)
    first, last = 0, len(begins)  # the longest that fits begins in this range, or nothing fits
    while first < last:
        middle = (first + last) // 2
        encoded = await encode(beginning_at(messages, begins[middle]))
        if encoded is None:
            first = middle + 1
        else:
            last, found = middle, encoded
    return found
