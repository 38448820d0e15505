"""One engine of several, seen from the front end; and the merging of several engines' events into one stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import msgspec

from engine import messages
from engine.commands import AddRequests

if TYPE_CHECKING:  # importing it loads ZMQ
    from engine.transport.process_client import ProcessClient

NOTHING_DONE = messages.SchedulerStats(
    step=0,
    num_running=0,
    num_waiting=0,
    kv_cache_usage=0.0,
    num_preemptions=0,
    prompt_tokens=0,
    prefix_cache_queries=0,
    prefix_cache_hits=0,
)


@dataclass(slots=True)
class Placed:
    """A request in an engine. While it waits there, `command` can be given to another engine, once."""

    replica: Replica
    request: messages.EngineCoreRequest
    prompt_tokens: int  # prompt tokens not yet charged to the tenant
    command: AddRequests | None


class Replica:
    """One engine of several: its client and its requests. Owned by a DataParallelClient."""

    def __init__(self, index: int, make: Callable[[int], ProcessClient], *, is_wanted: bool) -> None:
        self.index = index
        self.is_wanted = is_wanted  # if False, it gets no new requests and ends after its last one
        self._make = make
        self.engine_info: messages.EngineReady | None = None  # while the engine lives
        self.requests: dict[str, float] = {}  # request id → time when it was sent
        self.client = make(index)
        self.num_starts = 0
        self.num_deaths = 0  # deaths since its last token
        self._begin()

    def start(self) -> None:
        """Prepare to run, with a new client if this replica has run before."""
        if self.num_starts:
            self.client = self._make(self.index)
        self._begin()
        self.num_starts += 1

    def _begin(self) -> None:
        self.stats = NOTHING_DONE
        self.asked = 0.0  # when it was last asked for its whole prefix cache
        self.kv_sequence = 0  # the sequence number of its KV events at the latest check
        self.ended = anyio.Event()

    def mark_dead(self) -> None:
        """Drop its requests and let its client end, because it has died or is not wanted any more."""
        self.engine_info = None
        self.requests.clear()
        self.ended.set()

    @property
    def busy_since(self) -> float | None:
        """The time since which it has had work but made no step; None if it has no work or is dead.

        A replica that sleeps although it has requests counts as busy: it fails to receive them.
        """
        if self.engine_info is None:
            return None
        if not self.client.is_asleep:
            return self.client.last_progress
        oldest = next(iter(self.requests.values()), None)
        return None if oldest is None else max(self.client.last_progress, oldest)


def as_one_engine(engines: Sequence[messages.EngineReady]) -> messages.EngineReady:
    """Return one description of all engines: the strictest limits, and the sum of their blocks."""
    return msgspec.structs.replace(
        engines[0],
        vocab_size=min(each.vocab_size for each in engines),
        num_blocks=sum(each.num_blocks for each in engines),
        block_size=min(each.block_size for each in engines),
        max_model_len=min(each.max_model_len for each in engines),
    )


def merged(
    replicas: Sequence[Replica],
    outputs: list[messages.EngineCoreOutput],
    stats: messages.SchedulerStats,
    timestamp: float,
    *,
    step: int,
    num_held: int,
) -> messages.EngineCoreOutputs:
    """Return one replica's step as a step of all replicas: counters of this replica, levels summed over all.
    `num_held`: requests that are in no engine yet."""
    alive = [(each.engine_info.num_blocks, each.stats) for each in replicas if each.engine_info is not None]
    num_blocks = sum(blocks for blocks, _ in alive) or 1
    levels = msgspec.structs.replace(
        stats,
        step=step,
        num_running=sum(each.num_running for _, each in alive),
        num_waiting=sum(each.num_waiting for _, each in alive) + num_held,
        kv_cache_usage=sum(blocks * each.kv_cache_usage for blocks, each in alive) / num_blocks,
        checkpoints=_sum_of([each.checkpoints for _, each in alive if each.checkpoints is not None]),
    )
    return messages.EngineCoreOutputs(outputs=outputs, stats=levels, timestamp=timestamp)


def _sum_of(checkpoints: Sequence[messages.CheckpointStats]) -> messages.CheckpointStats | None:
    if not checkpoints:
        return None
    return messages.CheckpointStats(
        count=sum(each.count for each in checkpoints),
        num_bytes=sum(each.num_bytes for each in checkpoints),
        hits=sum(each.hits for each in checkpoints),
    )


def timed_out(request_id: str) -> messages.EngineCoreOutput:
    """Return the final output of a request that was not given to an engine before its deadline."""
    return messages.EngineCoreOutput(
        request_id=request_id, new_token_ids=[], finish_reason=messages.FinishReason.TIMEOUT
    )
