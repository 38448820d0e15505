"""A request as a scope: from the first byte of its body to the last byte of its answer.

1. Only the `RequestScope` calls ASGI's `receive()`. Hypercorn delivers `http.disconnect` exactly once, and its `send()`
   never fails after the client has gone, so a second receiver would consume the only sign of a disconnect.
2. The handler, a function of the scope, runs in a cancel scope that the disconnect cancels. So it leaves its context
   managers, such as an engine stream.
3. An exception of the handler becomes the answer: the JSON error envelope if nothing has been sent, an error frame if
   the answer is an event stream. A deadline or a drain ends the request in the same way.
4. A stream ends with its last event or an error frame, unless its client does not read.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs

import anyio
import anyio.lowlevel
from anyio import to_thread
from anyio.abc import TaskGroup
from starlette.types import Receive, Scope, Send

from app.admission.tenants import ANONYMOUS, Tenant
from app.config.settings import Settings
from app.http.hypercorn import CALL_ON_DISCONNECT, ServerConnection, current_connection
from app.http.record import OUTPUT_FIGURES, AccessRecord, Phase, Transcript
from app.observability.logs import request_logger
from engine.errors import HeadraceError
from engine.frontend.request_stream import RequestStream
from engine.messages import FinishReason
from protocol.errors import ApiError, to_api_error
from protocol.operations import Dialect
from protocol.registry import dialect_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span


Handler = Callable[["RequestScope"], Awaitable[None]]
RawHeaders = list[tuple[bytes, bytes]]

MAX_PIECE = 2**15  # bytes of an answer that are passed to the server at once; the client has `send_timeout` for each
MAX_QUERY_FIELDS = 64
SLOWEST_UPLOAD = 2**15  # bytes per second of a body that the handler reads, on average, after `body_timeout`
FILE_PIECE = 2**18  # bytes of a file that are read at once
IN_BATCH = "headrace.batch"  # the key of the ASGI scope that marks a row of a batch
BLOCKED_SECONDS = 0.01  # a call of send that takes longer has waited for the client
MAX_BLOCKED = 64
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_FIELD_PATH = re.compile(r"[a-z_]{1,40}(\.([a-z_]{1,40}|[0-9]{1,6})(?![^.]))*")


class RequestScope:
    """One HTTP request and its answer.

    `body` is complete when the handler runs. `tenant` belongs to the API key. `outputs` is the engine's stream, if the
    handler has opened one; the log line, trace and timeline have its figures. `blocked_seconds` is the time for which
    sending has waited for the client to read, and `blocked` are the first of the longer waits, as begin and end.
    `warning` is sent in the answer's header. `follows_another` is True if the stream ends with another request's.
    `is_batch` is True for a row of a batch. With `reads_body` the handler reads the body, in pieces.
    """

    # With so many attributes, instances do not share the keys of their dictionaries; slots save a dictionary for each.
    __slots__ = (
        *("_answered", "_asgi_send", "_body_timeout", "_ended_by", "_error_frame", "_handler", "_keep_alive"),
        *("_bodies", "_last_sent", "_num_sending", "_receive", "_send_timeout", "_sending_since"),
        *("_shield", "_task_group", "answer_id", "arrival_time", "blocked", "body", "client_gone"),
        *("blocked_seconds", "error_status", "marks", "span", "transcript"),
        *("connection", "error_code", "error_param", "headers", "http_version", "method", "outputs", "path"),
        *("asgi_scope", "follows_another", "model", "query_string", "received_time", "request_id", "status", "tenant"),
        *("is_batch", "path_params", "reads_body", "tenant_headers", "warning"),
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, settings: Settings, bodies: Bodies) -> None:
        self.asgi_scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.http_version: str = scope["http_version"]
        self.query_string: bytes = scope["query_string"]
        self.path_params: Mapping[str, str] = scope.get("path_params", {})
        self.headers = decode_headers(scope["headers"])
        self.tenant: Tenant = scope.get("headrace.tenant", ANONYMOUS)
        self.is_batch: bool = scope.get(IN_BATCH, False)
        self.reads_body = False
        self.request_id = self._choose_request_id()
        self.arrival_time = time.monotonic()
        self.received_time: float | None = None  # when the body was complete
        self.marks = [(Phase.RECEIVE, self.arrival_time)]  # phases before the engine's, with the time they began
        self.span: Span | None = None  # if requests are traced
        self.transcript: Transcript | None = None
        self.model: str | None = None  # the served name of its model, once that is known
        self.body = b""
        self.status: int | None = None
        self.client_gone = False
        self.error_code: str | None = None
        self.error_param: str | None = None  # the field at fault
        self.error_status: int | None = None  # of an error, even if the answer had begun with another status
        self.answer_id: str | None = None  # the id in the answer's body, as in "chatcmpl-..."
        self.outputs: RequestStream | None = None
        self.blocked_seconds = 0.0
        self.blocked: list[tuple[float, float]] = []
        self.warning: str | None = None
        self.tenant_headers: Callable[[], Iterable[tuple[bytes, bytes]]] = (
            tuple  # headers with the tenant's rate limits
        )
        self.follows_another = False
        self._keep_alive: tuple[float, bytes] | None = None  # of a stream: seconds of silence, and the bytes to send
        self._last_sent = self.arrival_time
        self._receive = receive
        self._asgi_send = send
        self._num_sending = 0
        self._sending_since: float | None = None  # the time since which the client has not read the data being sent
        self._bodies = bodies
        self._body_timeout = settings.body_timeout
        self._send_timeout = settings.send_timeout
        self._task_group: TaskGroup | None = None
        self._handler = anyio.CancelScope()
        self._error_frame: Callable[[ApiError], Awaitable[bytes]] | None = None
        self._answered = False  # the last byte is sent or being sent
        self._ended_by: ApiError | None = None
        self.connection: ServerConnection | None = current_connection()
        self._shield: anyio.CancelScope | None = None

    # --- used by handlers

    def warn(self, warning: str | None) -> None:
        """Add `warning`, if there is one, to the header `x-headrace-warning`, which must not have been sent yet."""
        self.warning = "; ".join(filter(None, (self.warning, warning))) or None

    @property
    def dialect(self) -> Dialect:
        return dialect_of(self.path, self.headers)

    def query(self) -> dict[str, list[str]]:
        """Return the fields of the query with all their values. Raises ApiError 400 for too many fields."""
        try:
            return parse_qs(self.query_string.decode("latin-1"), max_num_fields=MAX_QUERY_FIELDS)
        except ValueError:
            raise ApiError(400, f"The query takes at most {MAX_QUERY_FIELDS} fields.") from None

    def query_fields(self) -> dict[str, str]:
        """Return the fields of the query; of a repeated field, the last value."""
        return {name: values[-1] for name, values in self.query().items()}

    def start_soon(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a function concurrently with the handler; it is cancelled when the handler has finished."""
        assert self._task_group is not None
        self._task_group.start_soon(function)

    def mark(self, phase: Phase) -> None:
        self.marks.append((phase, time.monotonic()))

    @property
    def progress(self) -> str:
        """The status of the answer, as the Responses API names it."""
        return "in_progress"

    def attend(self, outputs: RequestStream) -> None:
        """Record that the engine's stream is open."""
        self.outputs = outputs

    async def send_json(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send the whole answer. `body` is JSON already."""
        await self.send_body(status, body, "application/json", headers)

    async def send_body(
        self, status: int, body: bytes, content_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send the whole answer, of any content type."""
        self._answered = True
        extra = [(b"content-length", str(len(body)).encode())]
        # A late answer is better than half an answer.
        with anyio.CancelScope(shield=not self.client_gone) as self._shield:
            await self._start_response(status, content_type, extra, headers, more_follows=True)
            await self._send_pieces(body, more_body=False)

    async def next_piece(self, num_read: int) -> bytes:
        """Return the next piece of a body, of which `num_read` bytes are read; b"" after the last one. Raises ApiError
        408 if it comes too slowly. Only for handlers of routes with `reads_body`."""
        seconds = self.arrival_time + self._body_timeout + num_read / SLOWEST_UPLOAD - time.monotonic()
        with anyio.move_on_after(seconds):
            while self.received_time is None:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    self._leave()
                    await anyio.sleep_forever()
                if not message.get("more_body", False):
                    self._end_body()
                    self._watch_for_disconnect()
                if piece := message.get("body", b""):
                    return piece
            return b""
        raise ApiError(408, "The request body comes too slowly.", code="body_timeout")

    async def send_file(self, path: Path, num_bytes: int) -> None:
        """Send a file of this length, without holding it in memory."""
        extra = [(b"content-length", str(num_bytes).encode())]
        file = await to_thread.run_sync(path.open, "rb")
        with file:
            await self._start_response(200, "application/octet-stream", extra, None, more_follows=True)
            while self.method != "HEAD" and (piece := await to_thread.run_sync(file.read, FILE_PIECE)):
                await self._send_pieces(piece, more_body=True)
        await self.end_stream(b"")

    async def start_stream(
        self,
        content_type: str,
        *,
        error_frame: Callable[[ApiError], Awaitable[bytes]],
        keep_alive: tuple[float, bytes],
        more_follows: bool = False,
    ) -> None:
        """Begin an answer that is sent in chunks. `error_frame` makes its last frame if an error ends it.

        `keep_alive` has the seconds of silence after which its bytes are sent, so that no proxy closes the connection.
        With `more_follows` the head is sent with the first chunk, which must follow at once.
        """
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies must not hold events back
        self._error_frame = error_frame
        await self._start_response(200, content_type, (), headers, more_follows=more_follows)
        if self.method == "HEAD":  # the client would read a body as the next answer's head
            await self.end_stream(b"")
            self._handler.cancel()
            await anyio.lowlevel.checkpoint()
        self._keep_alive = keep_alive

    async def error_event(self, error: ApiError) -> bytes:
        """Return the error as the last event of a stream in a dialect that has streams."""
        assert self.dialect.error_event is not None
        return self.dialect.error_event(error, self.request_id)

    async def send_chunk(self, data: bytes) -> None:
        """Send a chunk of a stream. Waits while the client's socket is full."""
        if len(data) <= MAX_PIECE:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            return
        with anyio.CancelScope(shield=not self.client_gone) as self._shield:  # clients cannot read half an event
            await self._send_pieces(data, more_body=True)

    @property
    def takes_more(self) -> bool:
        """True if `send_chunk_now` may be called: the stream has begun, and its connection can take a chunk at once."""
        return (
            self._error_frame is not None
            and not self._answered
            and self.connection is not None
            and self.http_version == "1.1"
            and self.connection.takes_more
        )

    def send_chunk_now(self, data: bytes) -> None:
        """Write a chunk of a stream straight to the transport, without waiting."""
        assert self.connection is not None
        self._last_sent = time.monotonic()
        self.connection.write_piece(data)

    async def end_stream(self, data: bytes) -> None:
        self._answered = True
        # A disconnect follows every answer. Without the shield it would interrupt Hypercorn's work after the last byte:
        # on trio, starting the connection's keep-alive timer.
        with anyio.CancelScope(shield=not self.client_gone) as self._shield:
            await self._send_pieces(data, more_body=False)

    def end_at(self, when: float, error: ApiError) -> None:
        """Give the request until `when` (`time.monotonic()`), then answer with `error`."""

        async def end() -> None:
            # A loop, because the event loop's timer may fire a millisecond early.
            while (left := when - time.monotonic()) > 0:  # noqa: ASYNC110 - a clock has no event
                await anyio.sleep(left)
            self.end(error, FinishReason.TIMEOUT)

        self.start_soon(end)

    def end(self, error: ApiError, reason: FinishReason) -> bool:
        """Cancel the handler and answer with `error`. `reason` is for the metrics.

        Returns False, and does nothing, if the answer is complete or the request has been ended before.
        """
        if self._answered or self._ended_by is not None:
            return False
        self._ended_by = error
        if self.outputs is not None:
            self.outputs.leave_reason = reason
        self._handler.cancel()
        return True

    @property
    def stalled_since(self) -> float | None:
        """The time since which the request has waited for its client to send its body or to read; None if it does not
        wait."""
        if self._sending_since is not None:
            return self._sending_since
        return self.arrival_time if self.received_time is None else None

    def cut(self) -> None:
        """Disconnect a client that does not read: abort its connection and leave the scope."""
        self.error_code = "client_stalled"
        if self._task_group is not None:
            self._leave()
        if self._shield is not None:
            self._shield.cancel()
        if self.connection is not None:
            self.connection.abort()

    def tick(self, now: float) -> None:
        """Disconnect the client if it does not read, or send a keep-alive comment if one is due at `now`. Called
        periodically for all requests, because a task for each would cost more."""
        if self._sending_since is not None:  # the stream is not silent; its client does not read
            if now - self._sending_since >= self._send_timeout:
                self.cut()
        elif self._keep_alive is not None and not self._answered and now - self._last_sent >= self._keep_alive[0]:
            comment = self._keep_alive[1]
            if self.takes_more:
                self.send_chunk_now(comment)
            else:
                self._last_sent = now
                self.start_soon(lambda: self._send_comment(comment))

    async def _send_comment(self, comment: bytes) -> None:
        if not self._num_sending and not self._answered:  # a comment must not be sent between the pieces of an event
            await self.send_chunk(comment)

    def record(self, *, route: str, model: str, status: int) -> AccessRecord:
        """Return the record of the request, which has ended just now."""
        figures = {} if self.outputs is None else {name: getattr(self.outputs, name) for name in OUTPUT_FIGURES}
        return AccessRecord(
            request_id=self.request_id,
            method=self.method,
            path=self.path,
            route=route,
            model=model,
            status=status,
            arrival_time=self.arrival_time,
            ended_time=time.monotonic(),
            error=self.error_code,
            param=_without_made_up_names(self.error_param),
            **figures,
        )

    # --- the scope itself

    async def run(self, handler: Handler) -> None:
        """Read the body, run the handler until it ends or the client leaves, and answer with its error, if any."""
        with self._bodies.held() as take:
            await self._run(handler, take)

    async def _run(self, handler: Handler, take: Callable[[int], None]) -> None:
        try:
            if not self.reads_body:
                limits = self._bodies.max_bytes, self._body_timeout
                self.body = await read_body(self._receive, self.headers, *limits, take)
                self._end_body()
            async with anyio.create_task_group() as self._task_group:
                if not self.reads_body:
                    self._watch_for_disconnect()
                with self._handler:
                    try:
                        await handler(self)
                    except Exception as error:
                        await self._answer_with(error)
                    finally:
                        self._keep_alive = None  # a comment is a new task, which a closing task group would refuse
                if self._ended_by is not None and not self._answered:
                    await self._answer_with(self._ended_by)
                self._task_group.cancel_scope.cancel()
        except ClientGone:
            self.client_gone = True
        except ApiError as error:
            await self._answer_with(error)

    def _end_body(self) -> None:
        self.received_time = time.monotonic()
        self.marks.append((Phase.PARSE, self.received_time))

    async def refuse(self, error: ApiError) -> None:
        """Answer without reading the body."""
        await self._answer_with(error)

    def _watch_for_disconnect(self) -> None:
        call_on_disconnect = self.asgi_scope.get("extensions", {}).pop(CALL_ON_DISCONNECT, None)
        if call_on_disconnect is None:
            self.start_soon(self._wait_for_disconnect)
        else:
            call_on_disconnect(self._on_disconnect)

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._on_disconnect()

    def _on_disconnect(self) -> None:
        if not self._answered:  # a disconnect follows every answer
            self._leave()

    def _leave(self) -> None:
        assert self._task_group is not None
        self.client_gone = True
        self._keep_alive = None
        self._task_group.cancel_scope.cancel()

    async def _answer_with(self, error: Exception) -> None:
        api_error = to_api_error(error)
        if not isinstance(error, HeadraceError | ApiError):  # a bug
            request_logger.error("request failed", request_id=self.request_id, path=self.path, exc_info=error)
        self.error_code, self.error_status = api_error.code or api_error.type, api_error.status
        self.error_param = api_error.param
        await self._send_error(api_error)

    async def _send_error(self, error: ApiError) -> None:
        if self.status is None:
            await self.send_json(error.status, self.dialect.error_body(error, self.request_id), error.headers)
        elif self._error_frame is not None and not self._answered:
            await self.end_stream(await self._error_frame(error))

    async def _send_pieces(self, data: bytes, *, more_body: bool) -> None:
        # In pieces, because every layer below copies its data, and because each piece that is sent shows that a slow
        # client still reads.
        for begin in range(0, len(data) - MAX_PIECE, MAX_PIECE):
            await self._send({"type": "http.response.body", "body": data[begin : begin + MAX_PIECE], "more_body": True})
        rest = data[(len(data) - 1) // MAX_PIECE * MAX_PIECE :] if len(data) > MAX_PIECE else data
        await self._send({"type": "http.response.body", "body": rest, "more_body": more_body})

    async def _send(self, message: dict[str, Any], *, more_follows: bool = False) -> None:
        connection = self.connection if self.http_version.startswith("1") else None
        started = time.monotonic()
        self._num_sending += 1
        if self._sending_since is None:
            self._sending_since = started
        try:
            if connection is not None:
                connection.hold()
            await self._asgi_send(message)
            if connection is not None and not more_follows:
                await connection.let_go()
        finally:
            ended = time.monotonic()
            self._num_sending -= 1
            self._sending_since = ended if self._num_sending else None  # a keep-alive comment may overlap a chunk
            self._last_sent = ended
            self.blocked_seconds += ended - started
            if ended - started >= BLOCKED_SECONDS and len(self.blocked) < MAX_BLOCKED:
                self.blocked.append((started, ended))

    async def _start_response(
        self,
        status: int,
        content_type: str,
        extra: Iterable[tuple[bytes, bytes]],
        headers: Mapping[str, str] | None,
        *,
        more_follows: bool,
    ) -> None:
        raw: RawHeaders = [
            (b"content-type", content_type.encode()),
            (b"x-request-id", self.request_id.encode()),
            *extra,
            *((name.encode(), value.encode()) for name, value in (headers or {}).items()),
            *self.tenant_headers(),
        ]
        if (header := self.dialect.request_id_header) is not None:
            raw.append((header, self.request_id.encode()))
        if self.warning is not None:
            raw.append((b"x-headrace-warning", self.warning.encode("ascii")))
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": raw}, more_follows=more_follows)

    def _choose_request_id(self) -> str:
        given = self.headers.get("x-request-id", "")
        return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _without_made_up_names(param: str | None) -> str | None:
    """Return the path of a field up to the first name that a client may have made up."""
    head = None if param is None or param.startswith("metadata.") else _FIELD_PATH.match(param)
    return param and (head[0] if head else param.partition(".")[0])


# --------------------------------------------------------------------------------------------------------- request body
# Reading the headers and the body of a request, within limits of size and time.


BYTES_BESIDE_PROMPT: Final = 4 * 2**20  # for tools, schemas, truncated parts of the conversation, several prompts
BYTES_PER_TOKEN: Final = 64  # of the context: several times the length of a token's text as JSON
MAX_BYTES_IN_ALL: Final = 256 * 2**20  # of all bodies, or four of the largest bodies if that is more


def decode_headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers by lower-case name; of a repeated header, the first."""
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
    """The client left before its whole request had arrived."""


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
