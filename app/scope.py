"""A request is a scope: from the first byte of its body to the last byte of its answer.

A `RequestScope` is the one owner of ASGI's `receive()`. Hypercorn delivers `http.disconnect` exactly once, and its
`send()` never fails after the client has gone, so whoever else listened would swallow the only sign there is. The scope
reads the body, then watches for the disconnect, and runs the handler in a cancel scope that the disconnect cancels.
Whatever the handler holds open (an engine stream above all) is left on the way out.

Handlers are plain functions of the scope and answer through it:

    async def handler(request: RequestScope) -> None:
        async with llm.stream(...) as outputs:
            ...
            await request.send_json(200, body)

What a handler raises becomes the answer: the JSON error envelope while nothing has been sent, afterwards an error
frame if the answer is an event stream. A stream never ends without either `[DONE]` or an error frame.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any

import anyio
from anyio.abc import TaskGroup
from starlette.types import Receive, Scope, Send

from app.logs import request_logger
from engine.errors import HeadraceError
from engine.output_processor import RequestStream
from protocol.errors import ApiError, to_api_error

Handler = Callable[["RequestScope"], Awaitable[None]]
RawHeaders = list[tuple[bytes, bytes]]

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class _ClientGone(Exception):
    """The client left before its request had arrived whole."""


class RequestScope:
    """One HTTP request and its answer.

    `body` is complete when the handler runs. `tenant` names whose request it is, from the API key. `generation` is the
    engine's stream, if the handler has opened one; the request's log line and trace tell its figures.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, max_body_bytes: int) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.path_params: Mapping[str, str] = scope.get("path_params", {})
        self.headers = _decode_headers(scope["headers"])
        self.tenant: str = scope.get("headrace.tenant", "")
        self.request_id = self._choose_request_id()
        self.arrival_time = time.monotonic()
        self.body = b""
        self.status: int | None = None
        self.client_gone = False
        self.error_code: str | None = None
        self.generation: RequestStream | None = None
        self._receive = receive
        self._send = send
        self._max_body_bytes = max_body_bytes
        self._task_group: TaskGroup | None = None
        self._error_frame: Callable[[ApiError], bytes] | None = None

    # --- what handlers use

    def start_soon(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a companion of the handler inside this scope; it is cancelled when the handler has finished."""
        assert self._task_group is not None
        self._task_group.start_soon(function)

    async def send_json(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """The whole answer at once. `body` is JSON already."""
        await self.send_body(status, body, "application/json", headers)

    async def send_body(
        self, status: int, body: bytes, content_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """The whole answer at once, of any type."""
        extra = [(b"content-length", str(len(body)).encode())]
        await self._start_response(status, content_type, extra, headers)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def start_stream(self, content_type: str, *, error_frame: Callable[[ApiError], bytes]) -> None:
        """Begin an answer that is sent piece by piece. `error_frame` says how it ends if something goes wrong."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies must not hold events back
        self._error_frame = error_frame
        await self._start_response(200, content_type, (), headers)

    async def send_chunk(self, data: bytes) -> None:
        """One piece of a stream. Waits while the client's socket is full."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self, data: bytes) -> None:
        """The last piece of a stream."""
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    # --- the scope itself

    async def run(self, handler: Handler) -> None:
        """Read the body, run the handler while the client is there, and turn what it raises into the answer."""
        try:
            self.body = await self._read_body()
            async with anyio.create_task_group() as self._task_group:
                self._task_group.start_soon(self._watch_for_disconnect)
                try:
                    await handler(self)
                except Exception as error:
                    await self._answer_with(error)
                self._task_group.cancel_scope.cancel()
        except _ClientGone:
            self.client_gone = True
        except ApiError as error:
            await self._answer_with(error)

    async def _read_body(self) -> bytes:
        if self.headers.get("content-encoding", "identity") != "identity":
            raise ApiError(415, "Compressed request bodies are not supported; send plain JSON.")
        announced = self.headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > self._max_body_bytes:
            raise self._too_large()
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _ClientGone
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self._max_body_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(chunks)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The request body is larger than the limit of {self._max_body_bytes} bytes.")

    async def _watch_for_disconnect(self) -> None:
        assert self._task_group is not None
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.client_gone = True
        self._task_group.cancel_scope.cancel()

    async def _answer_with(self, error: Exception) -> None:
        api_error = to_api_error(error)
        if not isinstance(error, HeadraceError | ApiError):  # nobody foresaw it: a bug, and this is its only trace
            request_logger.error("request failed", request_id=self.request_id, path=self.path, exc_info=error)
        self.error_code = api_error.code or api_error.type
        if self.status is None:
            await self.send_json(api_error.status, api_error.body(), api_error.headers)
        elif self._error_frame is not None:
            await self.end_stream(self._error_frame(api_error))

    async def _start_response(
        self, status: int, content_type: str, extra: Iterable[tuple[bytes, bytes]], headers: Mapping[str, str] | None
    ) -> None:
        raw: RawHeaders = [
            (b"content-type", content_type.encode()),
            (b"x-request-id", self.request_id.encode()),
            *extra,
            *((name.encode(), value.encode()) for name, value in (headers or {}).items()),
        ]
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    def _choose_request_id(self) -> str:
        given = self.headers.get("x-request-id", "")
        return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _decode_headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """By lower-case name; of a header that comes twice, the first."""
    headers: dict[str, str] = {}
    for name, value in raw:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return headers
