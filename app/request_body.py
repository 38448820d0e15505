"""The headers of a request, and its body, whole and in time, or why not. For `app.scope`, which owns `receive()`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import anyio
from starlette.types import Receive

from protocol.errors import ApiError


def decode_headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """By lower-case name; of a header that comes twice, the first."""
    headers: dict[str, str] = {}
    for name, value in raw:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return headers


class ClientGone(Exception):
    """The client left before its request had arrived whole."""


async def read_body(receive: Receive, headers: Mapping[str, str], max_bytes: int, seconds: float) -> bytes:
    """Raises ClientGone, and ApiError: 408 after `seconds`, 413 for more than `max_bytes`, 415 if compressed."""
    with anyio.move_on_after(seconds):
        return await _read(receive, headers, max_bytes)
    raise ApiError(408, f"The request body did not arrive within {seconds:g} s.", code="body_timeout")


async def _read(receive: Receive, headers: Mapping[str, str], max_bytes: int) -> bytes:
    if headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "Compressed request bodies are not supported; send plain JSON.")
    too_large = f"The request body is larger than the limit of {max_bytes} bytes."
    announced = headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > max_bytes:
        raise ApiError(413, too_large)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > max_bytes:
            raise ApiError(413, too_large)
        if not message.get("more_body", False):
            return b"".join(chunks)
