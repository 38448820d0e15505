"""The seam between the engine and whatever runs a plan.

The application chooses an executor and hands it to the engine; a simulated one stands in for a device in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from engine.config import Clock
from engine.errors import HeadraceError
from engine.messages import TierStats
from engine.plan import ModelRunnerOutput, SchedulerOutput

MAX_PROFILE_BYTES = 64 * 2**20  # of a profile's events, as JSON
STEPS_BETWEEN_EXPERT_LOADS = 64  # that are told of


class StepHandle(Protocol):
    """A step in flight."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its output. Raises what the step raised. Called once."""
        ...


class Executor(Protocol):
    """Runs plans in order. Used by one thread only, the engine's."""

    num_blocks: int  # KV blocks that exist; ids are 0 .. num_blocks - 1
    block_size: int  # tokens per block
    vocab_size: int

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> StepHandle:
        """Start one step. May return before it has run; plans are executed in the order given, each after the one
        before it, and results are asked for in that order.

        A plan may be made while the one before it is in flight. It then may schedule a request for one token that
        the step in flight is sampling: the executor knows it by the time it is needed.

        `abandoned` tells whether nobody wants the step's results any more. An executor that can stop in the middle
        asks it now and then, and raises StepAbandoned from `result`; one that cannot need not ask. The plan's diffs
        have been applied then, and no request has advanced. After any other error, too, no request may have advanced;
        the diffs may have been applied or not: all requests of the plan and all its removals are removed by the next.
        An error that `submit` can detect must be raised by `submit`: then no step is planned on top of it.

        What was submitted after a step that turns out to have failed means nothing: its result is waited for and
        dropped. It may compute anything, or raise, as long as it writes to no block but those of its requests.
        """
        ...

    def shutdown(self) -> None:
        """Release the device. Idempotent."""
        ...


@runtime_checkable
class Prepares(Protocol):
    """An executor that can use the time while nobody wants anything."""

    def prepare(self) -> bool:
        """Do about 0.1 s of work that makes later steps faster. Return True if there is more."""
        ...


@runtime_checkable
class ComputesHere(Protocol):
    """An executor that may compute in the thread that calls it, and not on a device or in other processes."""

    cpu_seconds: Clock | None  # of the calling thread; None where a device computes


@runtime_checkable
class CountsExperts(Protocol):
    """An executor whose model may have experts."""

    def tokens_of_experts(self) -> list[list[int]]:
        """Return the tokens of each expert of each layer with experts since the start, as one device would count them;
        it may be as of the last step whose number `STEPS_BETWEEN_EXPERT_LOADS` divides. Costs no step."""
        ...


@runtime_checkable
class Profiles(Protocol):
    """An executor that can tell what it does within a step."""

    def start_profile(self) -> None:
        """Record from now on."""
        ...

    def stop_profile(self) -> list[dict[str, Any]]:
        """Events of Chrome's trace format since then, in microseconds of `time.monotonic()`, on tracks from 3 on.
        Raises ProfileTooLarge for more than `MAX_PROFILE_BYTES`, and what the device or a disk raises."""
        ...


@runtime_checkable
class Watched(Protocol):
    """An executor that may end by itself, also while nothing is asked of it."""

    def watch(self, on_lost: Callable[[HeadraceError], None]) -> None:
        """Have this told what it ended of, once, on any thread. What is submitted from then on raises the same."""
        ...


@runtime_checkable
class KeepsBlocks(Protocol):
    """An executor that may have a tier beside its KV cache."""

    tier: BlockTier | None


class FailedStep:
    """The handle of a step that the executor could not even start."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> ModelRunnerOutput:
        raise self._error


class BlockTier(Protocol):
    """Where chunks are kept. Nothing here waits but `wait`, for a moment, and `close`; `gpu.kv_tiers.tier` has more."""

    key: bytes  # of the hashes, so that they mean the same after a restart
    blocks_per_chunk: int
    store_seconds: float  # that storing a chunk takes from the steps

    @property
    def is_storing(self) -> bool: ...
    @property
    def has_news(self) -> bool: ...
    def find(self, name: bytes) -> bool: ...
    def is_cheaper(self, seconds: float) -> bool: ...
    def load(self, names: Sequence[bytes], block_ids: Sequence[Sequence[int]]) -> int: ...  # negative ids: not wanted
    def cancel(self, ticket: int) -> None: ...
    def poll(self, seconds: float) -> list[tuple[int, int, str | None]]: ...
    def store(self, name: bytes, block_ids: Sequence[int]) -> bool: ...
    def touch(self, names: Sequence[bytes]) -> None: ...  # of a prefix that a request uses, from its beginning
    def discard(self, names: Iterable[bytes]) -> None: ...
    def wait(self) -> None: ...
    def take_stats(self) -> list[TierStats] | None: ...
    def close(self) -> None: ...
