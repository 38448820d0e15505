"""The policy of a server of several models: it decides which are in memory, without I/O or a clock of its own.

1. A model is loaded for its first request. The memory of all loaded models together never exceeds the limit; if one
   turns out to take more than was expected, models without requests make room for it.
2. Only a model without requests is unloaded, the least recently used first, and never a pinned one. A model stays for a
   minimum residence, so that two models that take turns do not spend all the time loading.
3. Requests for models that are not loaded wait in the order of their arrival. If the first needs memory and every
   model that could be unloaded has requests, the policy closes one of them when its turn is over: it finishes its
   requests, and its new requests wait. So requests are grouped by model, and every request gets its turn.
4. A turn ends sooner if the first waiting request would miss its deadline.
5. Rows of batches wait behind other requests, and do not unload a model that had one in the last `BATCH_IDLE` seconds.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

LEAST_RESIDENCE = 1.0  # seconds; a model that takes longer to load stays for as long as that
BATCH_IDLE = 60.0  # seconds since a model's latest request, after which a row of a batch may take its room
IDLE_SHARE = 0.25  # of its residence; a model that was idle for as long makes room at once
LONGEST_PAUSE = 60.0  # seconds between two loads of a model that fails again and again


class ModelState(enum.StrEnum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"


class PooledModel:
    """The state of one model that the policy reads and writes. `need` is its memory in bytes; None: not known yet."""

    def __init__(self, name: str, *, pinned: bool = False, idle_unload: float = 0.0) -> None:
        self.name = name
        self.pinned = pinned
        self.idle_unload = self.usual_idle_unload = idle_unload or math.inf  # clients may change the first
        self.state = ModelState.UNLOADED
        self.need: int | None = None
        self.host_need = 0  # bytes of the host's memory besides, for a model on a device
        self.in_use = 0  # requests
        self.num_rows = 0  # of these, rows of batches
        self.is_closed = False  # it takes no new requests, because another model waits for its room
        self.loaded_at = -math.inf
        self.last_used = -math.inf  # by a request that is no row of a batch
        self.load_seconds = 0.0  # of the latest load
        self.num_failures = 0  # in a row; a run for longer than its residence resets it
        self.retry_at = -math.inf
        self.error: Exception | None = None  # the latest failure

    @property
    def residence(self) -> float:
        """The seconds for which the model stays loaded even if another model needs its memory."""
        return max(LEAST_RESIDENCE, self.load_seconds)

    @property
    def holds_memory(self) -> bool:
        return self.state in (ModelState.LOADING, ModelState.LOADED, ModelState.UNLOADING)

    @property
    def is_open(self) -> bool:
        """True if a request can use it now."""
        return self.state is ModelState.LOADED and not self.is_closed


M = TypeVar("M", bound=PooledModel)


@dataclass(eq=False)
class Waiter(Generic[M]):
    """A request that waits for its model until the time `until`. The policy admits it or sets `error`, and then calls
    `wake`."""

    model: M
    since: float
    until: float
    is_row: bool = False  # a row of a batch
    is_admitted: bool = False
    error: Exception | None = None
    wake: Callable[[], None] = lambda: None


@dataclass
class Changes(Generic[M]):
    """The models to load now, with their memory reserved, and the models to unload."""

    load: list[M] = field(default_factory=list)
    unload: list[M] = field(default_factory=list)


class ModelPolicy(Generic[M]):
    """The models of one server, and the requests that wait for one. `limit` is in bytes. `host_limit` is the limit of
    the host's memory that models take besides."""

    def __init__(self, limit: int, host_limit: float = math.inf) -> None:
        self.limit = limit
        self.host_limit = host_limit
        self.models: dict[str, M] = {}
        self.waiting: list[Waiter[M]] = []

    @property
    def used(self) -> int:
        """The bytes of all models that are loaded, loading or unloading."""
        return sum(each.need or 0 for each in self.models.values() if each.holds_memory)

    def enter(self, model: M, now: float, until: float, *, is_row: bool = False) -> Waiter[M]:
        """Admit a request, or let it wait until `plan` admits it. The caller must call `leave` in the end."""
        waiter = Waiter(model, now, until, is_row)
        if model.is_open:
            self._admit(waiter)
        else:
            self.waiting.append(waiter)
        return waiter

    def leave(self, waiter: Waiter[M], now: float) -> None:
        """Remove a request that has ended or that stops waiting."""
        if waiter.is_admitted:
            waiter.model.in_use -= 1
            waiter.model.num_rows -= waiter.is_row
            if not waiter.is_row:
                waiter.model.last_used = now
        elif waiter in self.waiting:
            self.waiting.remove(waiter)

    def loaded(self, model: M, now: float, need: int, seconds: float) -> None:
        """Record that a model is loaded, and takes `need` bytes."""
        model.state, model.need, model.load_seconds = ModelState.LOADED, need, seconds
        model.loaded_at = model.last_used = now
        model.error, model.idle_unload = None, model.usual_idle_unload

    def unload(self, model: M, changes: Changes[M]) -> bool:
        """Begin to unload a model. Return False if it has requests or is not loaded."""
        if model.in_use or model.state not in (ModelState.LOADED, ModelState.LOADING) or self._awaited(model):
            return False
        model.state = ModelState.UNLOADING
        changes.unload.append(model)
        return True

    def unloaded(self, model: M) -> None:
        """Record that a model has freed its memory."""
        model.state, model.is_closed = ModelState.UNLOADED, False

    def failed(self, model: M, now: float, error: Exception) -> None:
        """Record that a model could not be loaded, or that its engine has died. The next request loads it again, after
        a pause that grows with the failures in a row."""
        if now - model.loaded_at > model.residence and model.state in (ModelState.LOADED, ModelState.UNLOADING):
            model.num_failures = 0
        model.state, model.is_closed, model.error = ModelState.FAILED, False, error
        model.num_failures += 1
        model.retry_at = now + min(LONGEST_PAUSE, 2.0 ** (model.num_failures - 2) if model.num_failures > 1 else 0.0)
        self.refuse(model, error)

    def refuse(self, model: M, error: Exception) -> None:
        """End the waiting of all requests for a model with an error."""
        refused = [each for each in self.waiting if each.model is model]
        self.waiting = [each for each in self.waiting if each.model is not model]
        for waiter in refused:
            waiter.error = error
            waiter.wake()

    def is_wanted(self, model: M) -> bool:
        """Return True for a model that has requests, or for which requests wait."""
        return model.in_use > 0 or any(each.model is model for each in self.waiting)

    def is_impossible(self, model: M) -> bool:
        """True if a model does not fit even after all models that are not pinned are unloaded."""
        pinned = [each for each in self.in_the_way_of(model) if each.pinned]
        need, host_need = sum(each.need or 0 for each in pinned), sum(each.host_need for each in pinned)
        return model.need is not None and (
            model.need + need > self.limit or model.host_need + host_need > self.host_limit
        )

    def in_the_way_of(self, model: M) -> list[M]:
        """Return the other models in memory."""
        return [each for each in self.models.values() if each is not model and each.holds_memory]

    def plan(self, now: float) -> Changes[M]:
        """Admit the requests for open models, and return the models to load and unload now. The caller calls it
        after every change, and periodically."""
        changes: Changes[M] = Changes()
        for model in self.models.values():
            model.is_closed = False
        self._make_room(now, changes)
        for waiter in [each for each in self.waiting if each.model.is_open]:
            self.waiting.remove(waiter)
            self._admit(waiter)
        over = self.used - self._leaving - self.limit  # where a loaded model takes more than was expected
        for model in sorted(self.models.values(), key=lambda each: each.last_used):
            is_idle = model.state is ModelState.LOADED and not model.in_use and not model.pinned
            if is_idle and (over > 0 or now >= model.last_used + model.idle_unload):
                self.unload(model, changes)
                over -= model.need or 0
        return changes

    @property
    def _leaving(self) -> int:
        """The bytes of models that are being unloaded."""
        return sum(each.need or 0 for each in self.models.values() if each.state is ModelState.UNLOADING)

    def _admit(self, waiter: Waiter[M]) -> None:
        waiter.is_admitted = True
        waiter.model.in_use += 1
        waiter.model.num_rows += waiter.is_row
        waiter.wake()

    def _make_room(self, now: float, changes: Changes[M]) -> None:
        """Start loading the models that requests wait for, in the order of their first requests. The first that does
        not fit stops the loop, so that later requests do not take the memory that it waits for."""
        for waiter in sorted(self.waiting, key=lambda each: each.is_row):
            model = waiter.model
            is_absent = model.state in (ModelState.UNLOADED, ModelState.FAILED) and now >= model.retry_at
            if not is_absent or model.need is None or self.is_impossible(model):
                continue
            lacking = self.used + model.need - self.limit
            of_host = (
                model.host_need
                - self.host_limit
                + sum(each.host_need for each in self.models.values() if each.holds_memory)
            )
            if lacking > 0 or of_host > 0:
                self._free(waiter, lacking, of_host, now, changes)
                return
            model.state = ModelState.LOADING
            changes.load.append(model)

    def _free(self, waiter: Waiter[M], lacking: int, of_host: float, now: float, changes: Changes[M]) -> None:
        """Unload models that hold `lacking` bytes together, and `of_host` of the host's; close those that still have
        requests."""
        lacking -= self._leaving
        of_host -= sum(each.host_need for each in self.models.values() if each.state is ModelState.UNLOADING)
        candidates = [
            each
            for each in self.models.values()
            if not each.pinned and each.state in (ModelState.LOADED, ModelState.LOADING) and not self._awaited(each)
        ]
        if waiter.is_row:
            free = [each for each in candidates if each.in_use == each.num_rows]
            candidates = [
                each for each in free if now > each.last_used + BATCH_IDLE or each.last_used == each.loaded_at
            ]
        # Models with a finished turn come first, then idle before busy ones, then the least recently used.
        candidates.sort(key=lambda each: (max(now, self._turn_end(each, waiter)), each.in_use > 0, each.last_used))
        chosen: list[M] = []
        for each in candidates:
            if lacking > 0 or (of_host > 0 and each.host_need):
                lacking -= each.need or 0
                of_host -= each.host_need
                chosen.append(each)
        over = [each for each in chosen if now >= self._turn_end(each, waiter)]
        is_enough = lacking <= 0 and of_host <= 0 and len(over) == len(chosen)
        for each in over:
            each.is_closed = is_enough or each.in_use > 0
        if is_enough and not any(each.in_use for each in chosen):
            for each in chosen:
                self.unload(each, changes)

    def _awaited(self, model: M) -> bool:
        """Return True for a model that is being loaded for a request."""
        return model.state is ModelState.LOADING and self.is_wanted(model)

    def _turn_end(self, model: M, waiter: Waiter[M]) -> float:
        """Return the time from which a model must make room for the model of `waiter`."""
        if model.state is ModelState.LOADING:
            return -math.inf
        begin = max(model.loaded_at, waiter.since) if model.in_use > model.num_rows else model.loaded_at
        in_time = waiter.until - 2 * max(waiter.model.load_seconds, 1.0)
        end = max(model.loaded_at + model.residence / 2, min(begin + model.residence, in_time))
        if not waiter.is_row and not self.is_wanted(model):
            end = min(end, model.last_used + IDLE_SHARE * model.residence)
        return end
