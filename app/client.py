"""A streaming HTTP/1.1 client for measurements, and a synchronous one for commands that talk to a server.

1. An `Exchange` is one request with the reads of its answer. The time of a read is when its last byte reached this
   machine: the kernel notes it (SO_TIMESTAMPNS), so the delay of a busy client does not count as the server's. With TLS
   it is the time at which the client read.
2. The end of an answer is found by its framing alone; its text is parsed later (`read_answer`).
"""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import resource
import socket
import ssl
import struct
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from time import perf_counter, time_ns
from typing import Any
from urllib.parse import SplitResult, urlsplit

import orjson

from app.config.settings import SettingsError
from app.workload.report import RequestRecord
from engine.errors import HeadraceError

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d{1,18})", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_CHUNK_SIZE = re.compile(rb"([0-9a-f]{1,16})[ \t]*(?:;|\Z)", re.IGNORECASE)
_CLOSES = re.compile(rb"^HTTP/1\.0|\r\nconnection: *close", re.IGNORECASE)
NO_HTTP = "the answer is not HTTP/1.1"
CLOSED_EARLY, CLOSED_LATE = "connection closed before an answer", "connection closed in mid-answer"
_SO_TIMESTAMPNS = 35  # Linux; the socket module has no name for it
_CLOSE = 5e-6  # seconds between two clock readings without an interruption
_HTTP = b"HTTP/1."
_TIMESPEC = struct.Struct("@ll")
_LAST_CHUNK = re.compile(rb"\r\n0+(?:;[^\r\n]*)?\r\n(?:[^\r\n:]+:[^\r\n]*\r\n)*\r\n\Z")  # with trailers
LOOKUP_TIMEOUT = 10.0  # seconds for facts of a server, which a stopped run does not wait for longer
MAX_HEAD, MAX_TRAILERS, MAX_CHUNK_HEAD = 2**16, 2**12, 2**12  # bytes


class Exchange:
    """One request and the bytes of its answer."""

    __slots__ = ("body_at", "chunked", "done", "end_time", "error", "head", "reads", "start_time", "times")

    def __init__(self) -> None:
        self.start_time = 0.0  # before the request was written or its connection was opened
        self.end_time = 0.0
        self.head = b""  # status line and headers
        self.body_at = 0  # offset of the body in the joined reads
        self.chunked = False
        self.reads: list[bytes] = []
        self.times: list[float] = []  # of each read
        self.error = ""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def body(self) -> Iterator[tuple[bytes, float]]:
        """Yield the parts of the body without framing, each with the time of its read."""
        skip = self.body_at
        pending, left = b"", 0  # left: bytes of the chunk that are still to come, including its line end
        for data, moment in zip(self.reads, self.times, strict=True):
            if skip >= len(data):
                skip -= len(data)
                continue
            data, skip = data[skip:], 0  # noqa: PLW2901
            if not self.chunked:
                yield data, moment
                continue
            pending += data
            while pending:
                if not left:
                    size, found, rest = pending.partition(b"\r\n")
                    if not found and len(size) < MAX_CHUNK_HEAD:
                        break
                    if not (digits := _CHUNK_SIZE.match(size)):
                        return  # not a chunk: the stream broke off
                    left, pending = int(digits[1], 16) + 2, rest
                    continue
                part, pending = pending[:left], pending[left:]
                left -= len(part)
                # This part may end with one or both bytes of the line end after the chunk.
                yield part[: len(part) - max(0, 2 - left)], moment


class Connection(asyncio.Protocol):
    """One connection and its current exchange. With TLS it is the protocol of an asyncio transport."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._exchange: Exchange | None = None
        self._bytes_left: int | None = None  # of a body of known length; None: the body ends with the connection

    def connection_made(self, transport: Any) -> None:  # uvloop's transports are no asyncio.Transport
        self.transport: asyncio.Transport | StampedSocket = transport

    def send(self, exchange: Exchange, request: bytes) -> None:
        """Write a request; its answer goes to `exchange`."""
        self._exchange = exchange
        self.transport.write(request)

    def data_received(self, data: bytes, time: float | None = None) -> None:
        exchange = self._exchange
        if exchange is None:  # bytes without a request
            self.transport.abort()
            return
        exchange.times.append(perf_counter() if time is None else max(time, exchange.start_time))
        exchange.reads.append(data)
        if not exchange.head:
            self._read_head(exchange)
        elif exchange.chunked:
            if (data.endswith(b"\r\n\r\n") or len(data) < 4) and _ends(exchange.reads):
                self._end()
        elif self._bytes_left is not None:
            self._bytes_left -= len(data)
            if self._bytes_left <= 0:
                self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.forget(self)
        if (exchange := self._exchange) is not None:
            to_its_end = exchange.head and not exchange.chunked and self._bytes_left is None and error is None
            why = CLOSED_LATE if exchange.reads else CLOSED_EARLY
            self._end("" if to_its_end else why, keep=False)

    def give_up(self, exchange: Exchange, why: str) -> None:
        """End the exchange if it still uses this connection."""
        if self._exchange is exchange:
            self._end(why, keep=False)

    def _read_head(self, exchange: Exchange) -> None:
        received = b"".join(exchange.reads)
        end = received.find(b"\r\n\r\n")
        while received.startswith(b"HTTP/1.1 1") and end >= 0:  # 100 Continue, 103 Early Hints: the answer follows
            received = received[end + 4 :]
            exchange.reads[:], exchange.times[:] = [received], exchange.times[-1:]
            end = received.find(b"\r\n\r\n")
        if end < 0:
            if len(received) > MAX_HEAD or not _HTTP.startswith(received[: len(_HTTP)]):
                self._end(NO_HTTP, keep=False)
            return
        exchange.head, exchange.body_at = received[:end], end + 4
        exchange.chunked = _CHUNKED.search(exchange.head) is not None
        length = _LENGTH.search(exchange.head)
        self._bytes_left = int(length[1]) - (len(received) - exchange.body_at) if length else None
        if _ends(exchange.reads) if exchange.chunked else self._bytes_left is not None and self._bytes_left <= 0:
            self._end()

    def _end(self, error: str = "", *, keep: bool = True) -> None:
        exchange = self._exchange
        assert exchange is not None
        self._exchange = None
        exchange.end_time = exchange.times[-1] if exchange.times and not error else perf_counter()
        exchange.error = error
        if keep and not _CLOSES.search(exchange.head):
            self._pool.free.append(self)
        else:
            self.transport.abort()
        if not exchange.done.done():
            exchange.done.set_result(None)


class KernelClock:
    """Converts the kernel's time (CLOCK_REALTIME) to that of `perf_counter`.

    A process that is descheduled between the readings of two clocks sees a wrong difference, so the difference is only
    updated by readings in quick succession.
    """

    def __init__(self) -> None:
        self._difference: float | None = None

    def time(self, seconds: int, nanoseconds: int) -> float:
        before, real, after = perf_counter(), time_ns(), perf_counter()
        if self._difference is None or after - before < _CLOSE:
            self._difference = 1e-9 * real - (before + after) / 2
        return min(seconds + 1e-9 * nanoseconds - self._difference, after)


_kernel_clock = KernelClock()


class StampedSocket:
    """A connection without TLS. Each read has the time of its arrival in the kernel, on the clock of `perf_counter`."""

    def __init__(self, sock: socket.socket, connection: Connection) -> None:
        self._socket = sock
        self._connection = connection
        self._unsent = b""
        self._is_open = True
        self._loop = asyncio.get_running_loop()
        with suppress(OSError):  # not Linux: the time at which the client reads is used
            sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop.add_reader(sock, self._read)

    def write(self, data: bytes) -> None:
        """Send now what the socket takes, and the rest when it has room."""
        self._unsent += data
        self._flush()

    def abort(self) -> None:
        self._close(None)

    def _flush(self) -> None:
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self._close(error)
            return
        if self._unsent:
            self._loop.add_writer(self._socket, self._flush)
        else:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data, notes, _, _ = self._socket.recvmsg(65536, 64)
        except BlockingIOError:
            return
        except OSError as error:
            self._close(error)
            return
        if not data:
            self._close(None)
            return
        time = None
        if notes:
            time = _kernel_clock.time(*_TIMESPEC.unpack(notes[0][2]))
        self._connection.data_received(data, time)

    def _close(self, error: Exception | None) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._loop.call_soon(self._connection.connection_lost, error)


class ConnectionPool:
    """Connections to one server, one for each concurrent exchange. A finished exchange leaves its connection to the
    next."""

    def __init__(
        self, base_url: str, headers: Mapping[str, str], *, verify: bool = True, timeout: float = 3600.0
    ) -> None:
        """Send `headers` with every request, and end it after `timeout` seconds. Raises SettingsError for a bad URL."""
        parts, self._prefix = server_address("--base-url", base_url)
        assert parts.hostname
        self.free: list[Connection] = []
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._timeout = timeout
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context()
            if not verify:
                self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        self._headers = {"host": parts.netloc.rpartition("@")[2], "accept": "*/*"}
        self._headers |= {name.lower(): value for name, value in headers.items()}

    def message(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
        """Return the bytes of a request. `headers`, in lower case, override those of the pool."""
        framing = {"content-type": "application/json", "content-length": str(len(body))}
        sent = self._headers | dict(headers or {}) | framing
        lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{lines}\r\n"
        return head.encode("latin-1") + body

    async def open(self, number: int) -> None:
        """Open connections in advance. Raises SettingsError if the server does not accept them."""
        try:
            for _ in range(number):
                self.free.append(await self._connect())
        except OSError as error:
            where = f"{self._host}:{self._port}"
            raise SettingsError(f"No answer from {where}: {error}. Start a server there, or name another") from error

    async def exchange(self, request: bytes, patience: float | None = None) -> Exchange:
        """Send a request and return when its answer has ended or failed. Cancellation closes the connection."""
        exchange = Exchange()
        exchange.start_time = perf_counter()
        for again in (True, False):
            try:
                reused = again and bool(self.free)
                connection = self.free.pop() if reused else await self._connect()
            except OSError as error:
                exchange.error, exchange.end_time = f"cannot connect: {error.strerror or error}", perf_counter()
                return exchange
            connection.send(exchange, request)
            giving_up = asyncio.get_running_loop().call_later(
                patience or self._timeout, connection.give_up, exchange, "timed out"
            )
            try:
                await exchange.done
            finally:
                giving_up.cancel()
                connection.give_up(exchange, "cancelled")
            if not (reused and exchange.error == CLOSED_EARLY):
                break
            # The server closed an idle connection just as it was used again.
            exchange.error, exchange.done = "", asyncio.get_running_loop().create_future()
        return exchange

    async def get_json(self, path: str, headers: Mapping[str, str] | None = None) -> Any:
        """Return the JSON that answers a GET; None if the status is not 200 or the body is not JSON."""
        exchange = await self.exchange(self.message("GET", path, headers=headers), min(self._timeout, LOOKUP_TIMEOUT))
        if not exchange.head.startswith(b"HTTP/1.1 200") or exchange.error:
            return None
        try:
            return orjson.loads(b"".join(part for part, _ in exchange.body()))
        except ValueError:
            return None

    def forget(self, connection: Connection) -> None:
        if connection in self.free:
            self.free.remove(connection)

    def close(self) -> None:
        for connection in self.free:
            connection.transport.abort()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        connection = Connection(self)
        if self._tls:
            await loop.create_connection(
                lambda: connection, self._host, self._port, ssl=self._tls, server_hostname=self._host
            )
            return connection
        error: OSError | None = None
        for family, kind, protocol, _, address in await loop.getaddrinfo(
            self._host, self._port, type=socket.SOCK_STREAM
        ):
            sock = socket.socket(family, kind, protocol)
            sock.setblocking(False)
            try:
                await loop.sock_connect(sock, address)
            except OSError as refused:
                sock.close()
                error = refused
                continue
            connection.connection_made(StampedSocket(sock, connection))
            return connection
        raise error or OSError("no address")


def _ends(reads: list[bytes]) -> bool:
    """Return True if the last chunk has arrived, in one read or in several."""
    return _LAST_CHUNK.search(b"".join(reads[-16:])[-MAX_TRAILERS:]) is not None


def allow_open_files() -> None:
    """Raise this process's limit of open files to the highest value that the system allows."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# -------------------------------------------------------------------------------------------------------- server client
# The synchronous client of the commands, on the standard library.


_UNPRINTABLE = "\n\t\u200d"  # unprintable, but a part of texts; the last one joins emoji


class ServerError(HeadraceError):
    """A request failed. The message is the server's if it sent one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(printable(message))
        self.status = status  # None: no HTTP answer came


def server_address(flag: str, url: str) -> tuple[SplitResult, str]:
    """Return a checked URL and the prefix of its API's paths; a trailing /v1, as clients of OpenAI's API write it, is
    ignored. Raises SettingsError."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts, parts.path.rstrip("/").removesuffix("/v1")
    except ValueError:  # of the port, or of an IPv6 address
        pass
    raise SettingsError(f"{flag}: got {url!r}; allowed: an http or https address, such as http://127.0.0.1:8000")


class ServerClient:
    """Calls one server with one key. `timeout` is the longest silence in seconds; None means no limit."""

    def __init__(self, url: str, key: str | None = None, *, timeout: float | None = None) -> None:
        parts, self._prefix = server_address("--url", url)
        if key and not (key.isascii() and key.isprintable()):
            raise SettingsError("--api-key: has characters that cannot be sent; allowed: printable ASCII")
        self.url = url
        self._connection_type = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._netloc = parts.netloc
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._timeout = timeout
        self.request_id: str | None = None  # of the latest stream, if the server gave one

    def get(self, path: str) -> bytes:
        """Return the body that answers a GET. Raises `ServerError`."""
        with self.request("GET", path) as response:
            return response.read()

    def models(self) -> list[dict[str, Any]]:
        """Return the cards of the served models, at least one."""
        with self.understood():
            cards: list[dict[str, Any]] = json.loads(self.get("/v1/models"))["data"]
            _ = cards[0], [(card["id"] + "", dict(card.get("chat_parameters") or {})) for card in cards]
        return cards

    def wait_until_ready(self, on_progress: Callable[[str], None], poll_seconds: float = 0.2) -> None:
        """Return when the server is ready, and report its progress until then. Raises `ServerError` if it fails."""
        while True:
            with self.request("GET", "/readyz", check=False) as response:
                if response.status == 200:
                    return
                status = json.load(response)
            if status["phase"] not in ("starting", "ready"):
                raise ServerError(f"The server is {status['phase']}.")
            share = f" {100 * status['done'] // status['total']} %" if status["total"] else ""
            on_progress(f"{status['task'] or 'Starting'}{share}")
            time.sleep(poll_seconds)

    def stream(self, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the chunks of a chat completion, including the usage. Closing the iterator early closes the connection,
        which aborts the request. Raises `ServerError`, also if the answer breaks off."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self.request("POST", "/v1/chat/completions", body) as response:
            self.request_id = response.headers.get("x-request-id")
            is_over = False
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    is_over |= data == b"[DONE]"
                    continue
                with self.understood():
                    chunk = json.loads(data)
                    if error := chunk.get("error"):
                        raise ServerError(str(error["message"]))
                yield chunk
        if not is_over:
            raise ServerError(
                f"The connection to {self.url} ended before the answer did: the text shown is incomplete."
            )

    @contextmanager
    def understood(self) -> Iterator[None]:
        """Turn errors raised while an answer is read into `ServerError`."""
        try:
            yield
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ServerError(f"The answer of {self.url} has an unknown form: {repr(error)[:200]}") from error

    @contextmanager
    def request(
        self, method: str, path: str, body: object = None, *, check: bool = True
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connection_type(self._netloc, timeout=self._timeout)
        try:
            payload = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, self._prefix + path, body=payload, headers=self._headers)
            response = connection.getresponse()
            if check and response.status != 200:
                raise ServerError(_error_message(response), response.status)
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"No answer from {self.url} ({error}). Start a server there: headrace serve") from error
        finally:
            connection.close()


def printable(text: str) -> str:
    """Replace unprintable characters: text of a server or model may contain a terminal's escape sequences."""
    return "".join(c if c.isprintable() or c in _UNPRINTABLE else "\N{REPLACEMENT CHARACTER}" for c in text)


def _error_message(response: http.client.HTTPResponse) -> str:
    text = response.read().decode("utf-8", "replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"HTTP {response.status}: {text[:200]}"


# -------------------------------------------------------------------------------------------------------------- answers
# From the bytes of an answer to the times of its pieces of text, its token counts, or the reason of its failure.
#
# A chunk or an event may be cut anywhere, lines end in LF or CRLF, comments and unknown fields are skipped. The time of
# an event is that of the read that completed its line.


EVENTS_AT_A_TIME = 16  # parsed before other tasks may run: some 50 µs
MOST_OF_A_MESSAGE = 300  # characters
_RETRY_AFTER = re.compile(rb"\r\nretry-after: *(\d{1,9}(?:\.\d{1,9})?)\s*(?:\r|\Z)", re.IGNORECASE)
MAX_COUNT = 2**53  # tokens; a larger count is an error
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
    for number, (data, moment) in enumerate(_events(exchange)):
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
            for choice in event.get("choices") or ():
                text, is_piece = _text_of(choice)
                finished = finished or choice.get("finish_reason") is not None
                if is_piece:
                    record.token_times.append(moment)
                    record.token_choices.append(_count(choice.get("index")))
                    texts.append(text)
            if usage := event.get("usage"):
                record.num_prompt_tokens = _count(usage.get("prompt_tokens")) or record.num_prompt_tokens
                record.num_output_tokens = _count(usage.get("completion_tokens"))
                details = usage.get("prompt_tokens_details") or {}
                record.num_cached_tokens = _count(details.get("cached_tokens"))
        except (ValueError, AttributeError, TypeError, KeyError):
            record.error = "an event of unknown form"
    record.text = "".join(texts)
    record.has_usage = record.num_output_tokens > 0
    record.num_output_tokens = record.num_output_tokens or len(record.token_times)
    if not record.error and not (finished and record.token_times):
        record.error = "no text came" if finished else "the stream broke off"


def _text_of(choice: dict[str, Any]) -> tuple[str, bool]:
    """Return the text of a choice, and whether it has a token. The first event of a chat has only a role, the last one
    only the finish reason; an event of a completion without text may be a token that has none."""
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
    """Return a server's count of tokens; 0 for None. Raises ValueError for anything else."""
    if value is None:
        return 0
    if not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        raise ValueError("no count of tokens")
    return value


def _error_in(body: bytes) -> tuple[str, str]:
    """Return code (or type) and message of an error in the form of OpenAI's API or a similar one."""
    try:
        answer = orjson.loads(body)
        error = answer.get("error", answer)
        code = error.get("code") or error.get("type") or ""
        return printable(str(code))[:80], printable(str(error.get("message") or ""))[:MOST_OF_A_MESSAGE]
    except (ValueError, AttributeError):
        return "", ""


def _events(exchange: Exchange) -> Iterator[tuple[bytes, float]]:
    """Yield the data of each event with its time. Events with several lines of data do not occur."""
    rest = b""
    for body, moment in exchange.body():
        *lines, rest = (rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip(), moment
    if rest.startswith(b"data:"):
        yield rest[5:].strip(), exchange.end_time
