"""Kept responses and their event logs, in memory. Used on the event loop; `keep` of long responses runs on threads.

1. A response is kept with its whole conversation, so it can be continued after the earlier responses are dropped.
2. The oldest responses of a tenant are dropped when there are too many, when they take too much memory, and when they
   are too old. A background response counts from its beginning, with its conversation and its events.
3. Nothing is written to disk, so a restart loses all responses.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import orjson

from app.config.settings import Settings
from app.http.scope import RequestScope
from protocol.errors import ApiError
from protocol.responses.output import ResponseStreamWriter

# ------------------------------------------------------------------------------------------------------------ event log
# The events of a background response, for clients that connect and disconnect while it is generated.
#
# The writer of the stream appends events. Each reader keeps its own position and asks for the events after it. The
# writer never waits for a reader: a reader that lags too far behind finds its events dropped. Used on the event loop
# only, except for `forget`, which any thread may call.


READ_AT_ONCE = 2**15  # approximate bytes that one `read` of a long log returns
_END = b"\n\n"  # the end of an event; JSON has no raw line breaks
_EVENT_LOG_OVERHEAD = 150  # bytes of a piece in addition to its events


class EventLog:
    """Events, numbered from 0 in the order of their `sequence_number`.

    `on_growth` is called with the number of bytes that were added. `num_bytes` is maintained by `ResponseStore`.
    """

    def __init__(self) -> None:
        self.on_growth: Callable[[int], None] = lambda num_bytes: None
        self.abandoned = anyio.Event()  # set when the response shall not be generated any further
        self.is_over = False  # no more events will be appended
        self.is_forgotten = False
        self.num_bytes = 0
        self.next_number = 0
        self._pieces: list[tuple[int, bytes]] = []  # the number of a piece's first event, and the piece's events
        self._error: ApiError | None = None
        self._grown = anyio.Event()

    def append(self, frames: bytes) -> None:
        if not frames:
            return
        piece = (self.next_number, frames)
        self.next_number += frames.count(_END)
        if self.is_forgotten:
            self._pieces = [piece]  # for the readers that still follow the log
        else:
            self._pieces.append(piece)
            self.on_growth(len(frames) + _EVENT_LOG_OVERHEAD)
        self._wake()

    def end(self, error: ApiError | None = None) -> None:
        """End the log. Readers that have read all events get `error`, if there is one. Idempotent."""
        if not self.is_over:
            self.is_over, self._error = True, error
            self._wake()

    def abandon(self, error: ApiError) -> None:
        """End the log with an error for its readers, and ask the generation of the response to stop."""
        self.end(error)
        self.abandoned.set()

    def forget(self) -> None:
        """Free the memory. Readers get only the events that are appended from now on."""
        self.is_forgotten, self._pieces, self.num_bytes = True, [], 0

    def forget_oldest(self, num_bytes: int) -> int:
        """Free at least so many bytes of the oldest events, but never the latest piece. Return the freed bytes."""
        freed = count = 0
        while freed < num_bytes and count < len(self._pieces) - 1:
            freed += len(self._pieces[count][1]) + _EVENT_LOG_OVERHEAD
            count += 1
        del self._pieces[:count]
        self.num_bytes -= freed
        return freed

    def read(self, number: int) -> tuple[bytes, int]:
        """Return events from this number on, and the number of the event after them; b"" if there are none yet.

        Raises the log's error if all events have been read, and ApiError 404 if they have been dropped.
        """
        pieces = self._pieces
        place = bisect_right(pieces, number, key=lambda piece: piece[0]) - 1
        if number < self.next_number and place < 0:
            gone = ApiError(404, f"The events before number {self._first} are not kept any more.", code="not_found")
            raise self._error or gone
        found: list[bytes] = []
        size = 0
        for at in range(max(place, 0), len(pieces)):
            first, frames = pieces[at]
            unread = _without(frames, number - first) if first < number else frames
            found.append(unread)
            size += len(unread)
            number = max(number, pieces[at + 1][0] if at + 1 < len(pieces) else self.next_number)
            if size >= READ_AT_ONCE:
                break
        if not size and self._error is not None:
            raise self._error
        return b"".join(found), number

    async def wait(self, number: float) -> None:
        """Wait until the event of this number is appended or the log ends."""
        while self.next_number <= number and not self.is_over:
            await self._grown.wait()

    @property
    def _first(self) -> int:
        return self._pieces[0][0] if self._pieces else self.next_number

    def _wake(self) -> None:
        self._grown.set()
        self._grown = anyio.Event()


def _without(frames: bytes, count: int) -> bytes:
    """Return the events after the first `count` events."""
    start = 0
    for _ in range(count):
        start = frames.find(_END, start) + len(_END)
        if start < len(_END):  # there are fewer events
            return b""
    return frames[start:]


# ------------------------------------------------------------------------------------------------------- response store


MAX_RESPONSES = 1000  # of one tenant
MAX_AGE = 3600.0  # seconds
RETRY_AFTER = 5  # seconds, a guess: the end of a background response cannot be predicted
_OVERHEAD = 512  # bytes of an entry in addition to its texts


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response object and the items before it, as JSON; `context` is empty if they were too large.

    `expires` is in seconds of `time.monotonic()`. `log` has the events of a background response.
    """

    body: bytes
    context: bytes
    expires: float
    log: EventLog | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.context) + _OVERHEAD

    def output(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = orjson.loads(self.body)["output"]
        return items

    def conversation(self) -> list[dict[str, Any]]:
        """Return the items that a next response continues: the items before this response, and its output."""
        items: list[dict[str, Any]] = orjson.loads(self.context)
        return items + self.output()


@dataclass(slots=True)
class _TenantLRU:
    """One tenant's kept responses, oldest first, and its running background responses; `num_bytes` is of both."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0
    num_background: int = 0

    def drop(self, response_id: str) -> None:
        dropped = self.responses.pop(response_id)
        self.num_bytes -= dropped.num_bytes
        self.forget(dropped.log)

    def forget(self, log: EventLog | None) -> None:
        if log is not None:
            self.num_bytes -= log.num_bytes
            log.forget()

    @property
    def undroppable_bytes(self) -> int:
        """The bytes of background responses that are still being generated."""
        return self.num_bytes - sum(
            each.num_bytes + (each.log.num_bytes if each.log else 0) for each in self.responses.values()
        )

    def fit(self, max_count: int, max_bytes: int) -> None:
        """Drop the oldest responses until the rest fits."""
        while self.responses and (len(self.responses) + self.num_background > max_count or self.num_bytes > max_bytes):
            self.drop(next(iter(self.responses)))


@dataclass(frozen=True, slots=True)
class RunningResponse:
    """A response that is being generated: its request, the writer of its events, and the items before it, as JSON."""

    request: RequestScope
    writer: ResponseStreamWriter
    context: bytes
    log: EventLog | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes that a background response holds in addition to its events."""
        return len(self.context) + len(self.request.body) + _OVERHEAD

    def response(self) -> dict[str, Any]:
        """Return the response object as far as it has been generated."""
        return self.writer.response(self.request.progress)


class ResponseStore:
    """The responses of all tenants. A tenant finds only its own."""

    def __init__(self, settings: Settings, max_count: int = MAX_RESPONSES) -> None:
        self._max_count = max_count
        self._max_bytes = settings.response_store_bytes
        self._max_background = min(settings.max_background_responses, max_count)
        self._lock = threading.RLock()  # guards all fields below; held for a few lookups, never during serialization
        self._by_tenant: dict[str, _TenantLRU] = {}
        self._running: dict[tuple[str, str], RunningResponse] = {}

    @property
    def is_off(self) -> bool:
        """True if no response is ever kept."""
        return self._max_bytes == 0

    def keep(
        self,
        tenant: str,
        response_id: str,
        body: bytes,
        context: bytes,
        log: EventLog | None = None,
        too_large: bytes = b"",
    ) -> None:
        """Keep a response, and drop the tenant's oldest responses to make room for it.

        A response that could not fit even alone is not kept, and no other response is dropped for it. If it is a
        background response (it has a `log`), `too_large` is kept instead, without its context. A background response
        that was deleted before it ended is not kept.
        """
        response = StoredResponse(body, context, time.monotonic() + MAX_AGE, log)
        with self._lock:
            kept = self._by_tenant.setdefault(tenant, _TenantLRU())
            if log is not None:
                running = self._running.get((tenant, response_id))
                if running is None or running.log is not log:
                    return
                self._forget_running(response_id, running)
            if response_id in kept.responses:
                kept.drop(response_id)
            room = self._max_bytes - kept.undroppable_bytes
            if response.num_bytes > room and log is not None:
                kept.num_bytes -= (freed := log.forget_oldest(response.num_bytes - room))
                room += freed
                if response.num_bytes > room:
                    response = StoredResponse(too_large, b"", response.expires, log)
            if response.num_bytes > room or kept.num_background >= self._max_count:
                kept.forget(log)
                return
            kept.responses[response_id] = response
            kept.num_bytes += response.num_bytes
            kept.fit(self._max_count, self._max_bytes)

    def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a kept response of this tenant, or None."""
        with self._lock:
            self.expire(time.monotonic())
            kept = self._by_tenant.get(tenant)
            return kept.responses.get(response_id) if kept is not None else None

    def delete(self, tenant: str, response_id: str) -> bool:
        """Drop a kept response. Return False if there was none."""
        with self._lock:
            if self.find(tenant, response_id) is None:
                return False
            self._by_tenant[tenant].drop(response_id)
            return True

    @contextmanager
    def running(self, response_id: str, response: RunningResponse) -> Iterator[None]:
        """Make a response findable while it is generated. Raises ApiError 409 if a background response has this id."""
        self._begin(response_id, response)
        try:
            yield
        finally:
            self.end(response_id, response)

    def begin(self, response_id: str, response: RunningResponse, log: EventLog) -> None:
        """Make a background response findable until `end` is called or the response is kept.

        Raises ApiError 429 if its tenant has too much in the background, 400 if its conversation alone exceeds the
        tenant's memory, and 409 if a running background response has this id.
        """
        tenant = response.request.tenant.name
        with self._lock:
            own = self._by_tenant.setdefault(tenant, _TenantLRU())
            if own.num_background >= self._max_background:
                raise self._refusal(f"{own.num_background} of {self._max_background} responses")
            size = response.num_bytes
            taken = own.undroppable_bytes
            if size > self._max_bytes:
                raise ApiError(
                    400, f"background takes a conversation of at most {self._max_bytes} bytes here.", param="background"
                )
            if taken + size > self._max_bytes:
                raise self._refusal(f"{taken} of {self._max_bytes} bytes are taken, {size} more")
            self._begin(response_id, response)
            if response_id in own.responses:
                own.drop(response_id)
            own.num_background += 1
            own.num_bytes += size
            own.fit(self._max_count, self._max_bytes)
        log.on_growth = lambda num_bytes: self._on_growth(tenant, log, num_bytes)

    def end(self, response_id: str, response: RunningResponse) -> None:
        """Remove a response that is not generated any more, with its events if it was not kept. Idempotent."""
        with self._lock:
            if self._running.get((response.request.tenant.name, response_id)) is response:
                own = self._by_tenant.get(response.request.tenant.name)
                self._forget_running(response_id, response)
                if own is not None:
                    own.forget(response.log)

    def _begin(self, response_id: str, response: RunningResponse) -> None:
        key = (response.request.tenant.name, response_id)
        if (other := self._running.get(key)) is not None and other.log is not None:
            raise ApiError(
                409,
                "A response of this id is being made in the background.",
                code="response_running",
                headers={"x-should-retry": "false"},
            )
        self._running[key] = response

    def _forget_running(self, response_id: str, response: RunningResponse) -> None:
        tenant = response.request.tenant.name
        del self._running[tenant, response_id]
        if response.log is not None:
            own = self._by_tenant[tenant]
            own.num_background -= 1
            own.num_bytes -= response.num_bytes

    def _on_growth(self, tenant: str, log: EventLog, num_bytes: int) -> None:
        with self._lock:
            if log.is_forgotten:
                return
            own = self._by_tenant[tenant]
            log.num_bytes += num_bytes
            own.num_bytes += num_bytes
            own.fit(self._max_count, self._max_bytes)
            if own.num_bytes > self._max_bytes:  # only background responses that are being generated are left
                own.num_bytes -= log.forget_oldest(own.num_bytes - self._max_bytes + log.num_bytes // 8)

    def _refusal(self, full: str) -> ApiError:
        return ApiError(
            429,
            f"You have too much in the background: {full}. Please try again later.",
            code="queue_full",
            headers={"retry-after": str(RETRY_AFTER)},
        )

    def find_running(self, tenant: str, response_id: str) -> RunningResponse | None:
        """Return a response of this tenant that is being generated, or None."""
        return self._running.get((tenant, response_id))

    def expire(self, now: float) -> None:
        """Drop responses that are too old. Called periodically, so that memory of inactive tenants is freed, too."""
        with self._lock:
            for tenant, kept in list(self._by_tenant.items()):
                while kept.responses and next(iter(kept.responses.values())).expires <= now:
                    kept.drop(next(iter(kept.responses)))
                if not kept.responses and not kept.num_background:
                    del self._by_tenant[tenant]
