"""Frames of a `text/event-stream` body. Imported by the streamed wire formats and by the app's SSE response."""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"
"""Ends every OpenAI stream, one that failed too."""

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it, proxies see that the connection lives."""


def data_frame(payload: bytes) -> bytes:
    """One event. JSON has no raw line breaks, so one `data:` line holds any payload."""
    return b"data: " + payload + b"\n\n"
