"""Responses that can be asked for: those being made, and a bounded memory for each tenant of those that were.

A response is kept with the whole conversation that led to it, so it can be continued after those before it are gone.
The oldest are dropped when there are too many, when they take too much memory, and when their time is over. Nothing is
written to disk, and a restart forgets everything. Used on the event loop and, for long responses, on worker threads.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from app.scope import RequestScope
from app.settings import Settings
from protocol.responses.output import ResponseStreamWriter

_OVERHEAD = 512  # bytes of an entry beside its texts


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The response object and the items before it, as JSON. `expires` is in seconds of `time.monotonic()`."""

    body: bytes
    context: bytes
    expires: float

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.context) + _OVERHEAD

    def output(self) -> list[dict[str, Any]]:
        """The items of the response."""
        items: list[dict[str, Any]] = orjson.loads(self.body)["output"]
        return items

    def context_items(self) -> list[dict[str, Any]]:
        """The items that the response was made from, instructions not among them."""
        items: list[dict[str, Any]] = orjson.loads(self.context)
        return items

    def conversation(self) -> list[dict[str, Any]]:
        """The items that a next response continues: those before this one, and its output."""
        return self.context_items() + self.output()


@dataclass(slots=True)
class _TenantLRU:
    """One tenant's responses, the oldest first."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0

    def drop(self, response_id: str) -> None:
        self.num_bytes -= self.responses.pop(response_id).num_bytes


@dataclass(frozen=True, slots=True)
class RunningResponse:
    """A response that is being made: by which request, and how far it is."""

    request: RequestScope
    writer: ResponseStreamWriter


class ResponseStore:
    """The responses of all tenants; nobody finds another's."""

    def __init__(self, settings: Settings) -> None:
        self._max_count = settings.response_store_size
        self._max_bytes = settings.response_store_bytes
        self._max_age = settings.response_store_age
        self._lock = threading.RLock()  # of all that is kept; held for a few lookups, never while anything is made
        self._by_tenant: dict[str, _TenantLRU] = {}
        self._running: dict[tuple[str, str], RunningResponse] = {}

    @property
    def is_off(self) -> bool:
        """Whether nothing is ever kept."""
        return self._max_count == 0

    def keep(self, tenant: str, response_id: str, body: bytes, context: bytes) -> None:
        """Keep a response, at the cost of the tenant's oldest. One that is larger than all the room is not kept."""
        response = StoredResponse(body, context, time.monotonic() + self._max_age)
        with self._lock:
            kept = self._by_tenant.setdefault(tenant, _TenantLRU())
            if response_id in kept.responses:
                kept.drop(response_id)
            kept.responses[response_id] = response
            kept.num_bytes += response.num_bytes
            while len(kept.responses) > self._max_count or kept.num_bytes > self._max_bytes:
                kept.drop(next(iter(kept.responses)))

    def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        """A response of this tenant's, unless it is gone."""
        with self._lock:
            self.expire(time.monotonic())
            kept = self._by_tenant.get(tenant)
            return kept.responses.get(response_id) if kept is not None else None

    def delete(self, tenant: str, response_id: str) -> bool:
        """Forget a response. Returns whether there was one."""
        with self._lock:
            if self.find(tenant, response_id) is None:
                return False
            self._by_tenant[tenant].drop(response_id)
            return True

    @contextmanager
    def running(self, response_id: str, response: RunningResponse) -> Iterator[None]:
        """Lets a response be found while it is made."""
        key = (response.request.tenant.name, response_id)
        self._running[key] = response
        try:
            yield
        finally:
            if self._running.get(key) is response:  # a client may use an id twice
                del self._running[key]

    def find_running(self, tenant: str, response_id: str) -> RunningResponse | None:
        """A response of this tenant's that is being made."""
        return self._running.get((tenant, response_id))

    def expire(self, now: float) -> None:
        """Drop what is too old. Called every so often, so that the memory of a tenant who is gone comes back."""
        with self._lock:
            for tenant, kept in list(self._by_tenant.items()):
                while kept.responses and next(iter(kept.responses.values())).expires <= now:
                    kept.drop(next(iter(kept.responses)))
                if not kept.responses:
                    del self._by_tenant[tenant]
