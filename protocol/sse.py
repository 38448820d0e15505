"""Frames of a `text/event-stream` body. Imported by the streamed wire formats and by the app's streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

CONTENT_TYPE = "text/event-stream; charset=utf-8"

DONE = b"data: [DONE]\n\n"
"""Ends every stream of chat and completions, one that failed too."""

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it, proxies see that the connection lives."""


def data_frame(payload: bytes) -> bytes:
    """One event. JSON has no raw line breaks, so one `data:` line holds any payload."""
    return b"data: " + payload + b"\n\n"


def event_frame(name: str, data: Mapping[str, Any]) -> bytes:
    """One event with a name, for wire formats whose clients go by it."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))
