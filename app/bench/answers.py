"""What the bytes of an answer say: when each piece of text came, what it cost in tokens, or why it failed.

Any framing and any chunking is understood: a chunk or an event may be cut anywhere, lines end in LF or CRLF, comments
and unknown fields are passed over. The time of an event is that of the read that completed its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson

from app.bench.connection import Exchange
from app.bench.report import RequestRecord
from app.server_client import printable

EVENTS_AT_A_TIME = 16  # read before others may run: some 50 µs
MOST_OF_A_MESSAGE = 300  # characters
_RETRY_AFTER = re.compile(rb"\r\nretry-after: *(\d{1,9}(?:\.\d{1,9})?)\s*(?:\r|\Z)", re.IGNORECASE)
MAX_COUNT = 2**53  # of tokens: what is more is not believed
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")


def read_answer(exchange: Exchange, record: RequestRecord) -> Iterator[None]:
    """Fill in `record` from `exchange`, a few events at a time."""
    record.start_time, record.end_time, record.error = exchange.start_time, exchange.end_time, exchange.error
    if not exchange.head:
        return
    record.status = int(exchange.head[9:12]) if exchange.head[9:12].isdigit() else 0
    if record.status != 200:
        code, record.message = _error_in(b"".join(piece for piece, _ in exchange.body()))
        record.error = f"HTTP {record.status} {code}".rstrip()
        if found := _RETRY_AFTER.search(exchange.head):
            record.retry_after = float(found[1])
        return
    texts: list[str] = []
    finished = False
    for number, (data, time) in enumerate(_events(exchange)):
        if number % EVENTS_AT_A_TIME == 0:
            yield
        if data == b"[DONE]":
            finished = True
            continue
        try:
            event = orjson.loads(data)
            if event.get("error"):
                code, record.message = _error_in(data)
                record.error = f"error event {code}".rstrip()
                continue
            choices = event.get("choices")
            if choices:
                text, is_piece = _text_of(choices[0])
                finished = finished or choices[0].get("finish_reason") is not None
                if is_piece:
                    record.token_times.append(time)
                    texts.append(text)
            if usage := event.get("usage"):
                record.num_prompt_tokens = _count(usage.get("prompt_tokens")) or record.num_prompt_tokens
                record.num_output_tokens = _count(usage.get("completion_tokens"))
                details = usage.get("prompt_tokens_details") or {}
                record.num_cached_tokens = _count(details.get("cached_tokens"))
        except (ValueError, AttributeError, TypeError, KeyError):
            record.error = "an event that is not understood"
    record.text = "".join(texts)
    record.has_usage = record.num_output_tokens > 0
    record.num_output_tokens = record.num_output_tokens or len(record.token_times)
    if not record.error and not (finished and record.token_times):
        record.error = "no text came" if finished else "the stream broke off"


def _text_of(choice: dict[str, Any]) -> tuple[str, bool]:
    """The text of a choice, and whether there is a token in it: the first event of a chat only tells a role, the last
    one only why it ended; an event of a completion without text may be a token that has none."""
    if (delta := choice.get("delta")) is None:
        text = choice["text"] or ""
        is_piece = bool(text) or choice.get("finish_reason") is None
    else:
        text = delta.get("content") or ""
        is_piece = any(delta.get(name) for name in _TEXT_FIELDS)
    if not isinstance(text, str):
        raise TypeError("text is no string")
    return text, is_piece


def _count(value: object) -> int:
    """Tokens that a server has counted. Raises ValueError for what cannot be a count; None is 0."""
    if value is None:
        return 0
    if not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        raise ValueError("no count of tokens")
    return value


def _error_in(body: bytes) -> tuple[str, str]:
    """The word that tells one failure from another, and the message, of the errors of OpenAI's API and of others."""
    try:
        answer = orjson.loads(body)
        error = answer.get("error", answer)
        code = error.get("code") or error.get("type") or ""
        return printable(str(code))[:80], printable(str(error.get("message") or ""))[:MOST_OF_A_MESSAGE]
    except (ValueError, AttributeError):
        return "", ""


def _events(exchange: Exchange) -> Iterator[tuple[bytes, float]]:
    """The data of each event, and when it was complete. One with several lines of data does not occur."""
    rest = b""
    for body, time in exchange.body():
        *lines, rest = (rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip(), time
    if rest.startswith(b"data:"):
        yield rest[5:].strip(), exchange.end_time
