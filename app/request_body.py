"""The headers of a request, and its body, whole and in time, or why not. For `app.scope`, which owns `receive()`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import anyio
from starlette.types import Receive

from protocol.errors import ApiError

BYTES_BESIDE_PROMPT: Final = 4 * 2**20  # tools, schemas, parts of the conversation that are cut, several prompts
BYTES_PER_TOKEN: Final = 64  # of the context: several times what a token's text takes as JSON
MAX_BYTES_IN_ALL: Final = 256 * 2**20  # or four of the largest bodies


def decode_headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """By lower-case name; of a header that comes twice, the first."""
    headers: dict[str, str] = {}
    for name, value in raw:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return headers


class Bodies:
    """The limits of one request's body and of all bodies in memory together. A server has one instance.

    `max_bytes` is the limit of one body. Unless `given` sets it, it follows from the model's context, once that is
    known: a longer body would be refused anyway, but only after it was read and decoded.
    """

    def __init__(self, given: int | None) -> None:
        self._given = given
        self.max_bytes = given or MAX_BYTES_IN_ALL // 4
        self.num_held = 0  # bytes

    def follow_context(self, max_model_len: int) -> None:
        """Set the limit of one body by the longest prompt, in tokens."""
        if self._given is None:
            self.max_bytes = BYTES_BESIDE_PROMPT + BYTES_PER_TOKEN * max_model_len

    @contextmanager
    def held(self) -> Iterator[Callable[[int], None]]:
        """Count the body of one request until the block is left. Yields a function that counts further bytes, and
        raises ApiError 503 if all bodies together exceed their limit."""
        mine = 0

        def take(num_bytes: int) -> None:
            nonlocal mine
            if self.num_held + num_bytes > max(MAX_BYTES_IN_ALL, 4 * self.max_bytes):
                raise ApiError(
                    503,
                    "The bodies of all requests that are being read or answered take too much memory. Send the request "
                    "again later.",
                    code="too_many_bodies",
                    headers={"retry-after": "2"},
                )
            mine += num_bytes
            self.num_held += num_bytes

        try:
            yield take
        finally:
            self.num_held -= mine


class ClientGone(Exception):
    """The client left before its request had arrived whole."""


async def read_body(
    receive: Receive, headers: Mapping[str, str], max_bytes: int, seconds: float, take: Callable[[int], None]
) -> bytes:
    """Return the whole body. `take` is called with the number of bytes of each piece.

    Raises ClientGone, ApiError 408 after `seconds`, 413 for more than `max_bytes`, 415 if compressed, and what `take`
    raises.
    """
    with anyio.move_on_after(seconds):
        return await _read(receive, headers, max_bytes, take)
    raise ApiError(408, f"The request body did not arrive within {seconds:g} s.", code="body_timeout")


async def _read(receive: Receive, headers: Mapping[str, str], max_bytes: int, take: Callable[[int], None]) -> bytes:
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
        take(len(chunks[-1]))
        if not message.get("more_body", False):
            return b"".join(chunks)
