"""The interface between the engine and the device that runs its plans.

The application chooses an executor and gives it to the engine; in tests a simulated one replaces a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from ctypes import c_int32
from functools import partial
from typing import Any, Protocol, runtime_checkable

from engine.config import Clock
from engine.errors import HeadraceError
from engine.messages import TierStats
from engine.plan import ModelRunnerOutput, SchedulerOutput

MAX_PROFILE_BYTES = 64 * 2**20  # of a profile's events as JSON
STEPS_BETWEEN_EXPERT_LOADS = 64  # between two reports of `SchedulerStats.expert_load`


class StepHandle(Protocol):
    """A step in flight."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its output. Raises what the step raised. Called once."""


class AbortCheck:
    """Returns True if all requests of a step have been aborted. `news` is 0 while it would return False: native code
    reads that without the interpreter's lock. None: there is no such number."""

    def __init__(self, is_abandoned: Callable[[Sequence[str]], bool], request_ids: Sequence[str]) -> None:
        self.news: c_int32 | None = getattr(is_abandoned, "news", None)
        self._ask = partial(is_abandoned, request_ids)

    def __call__(self) -> bool:
        return self._ask()


class Executor(Protocol):
    """Runs plans in order. Used only by the engine's thread."""

    num_blocks: int  # KV blocks that exist; ids are 0 .. num_blocks - 1
    block_size: int  # tokens per block
    vocab_size: int

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> StepHandle:
        """Start one step. May return before the step has run.

        1. Plans run in the order of the calls, each after the one before, and `result` is called in that order.
        2. A plan may be made while the step before it is in flight. It then may compute a token that this step is still
           sampling: the executor has it by the time it is needed.
        3. `abandoned` returns True if all requests of the step have been aborted. An executor that can interrupt a step
           calls it now and then, and raises StepAbandoned from `result`. The plan's diffs have been applied then, and
           no request has advanced.
        4. After any other error no request may have advanced either. The diffs may have been applied or not: the next
           plan again removes all requests of this plan, and all that it removed. `submit` must raise errors that it can
           detect, so that no further step is planned.
        5. The results of steps after a failed step are waited for and dropped. Such a step may compute anything or
           raise, but may only write to blocks of its requests.
        """

    def shutdown(self) -> None:
        """Release the device. May be called twice."""


@runtime_checkable
class Prepares(Protocol):
    """An executor that can use the time without requests."""

    def prepare(self) -> bool:
        """Do about 0.1 s of work that makes later steps faster. Return True if there is more."""


@runtime_checkable
class ComputesHere(Protocol):
    """An executor that may compute in the calling thread, instead of on a device or in other processes."""

    cpu_seconds: Clock | None  # of the calling thread; None if a device computes


@runtime_checkable
class CountsExperts(Protocol):
    """An executor of a model that may have experts."""

    def tokens_of_experts(self) -> list[list[int]]:
        """Return the tokens of each expert since the start, for each layer with experts, as if one device computed the
        model. The counts may be those after the latest step with a number divisible by `STEPS_BETWEEN_EXPERT_LOADS`."""


@runtime_checkable
class Profiles(Protocol):
    """An executor that can record what it does in a step."""

    def start_profile(self) -> None: ...

    def stop_profile(self) -> list[dict[str, Any]]:
        """Return the events since `start_profile` in Chrome's trace format, in microseconds of `time.monotonic()`, with
        a `tid` from 3 on. Raises ProfileTooLarge above `MAX_PROFILE_BYTES`, and errors of device or disk."""


@runtime_checkable
class Watched(Protocol):
    """An executor that may end by itself, even between steps."""

    def watch(self, on_lost: Callable[[HeadraceError], None]) -> None:
        """Have `on_lost` called once, on any thread, with the error that ends the executor. Later steps raise it."""


@runtime_checkable
class KeepsBlocks(Protocol):
    """An executor that may have a tier below its KV cache."""

    tier: BlockTier | None


class FailedStep:
    """The handle of a step that the executor could not start."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> ModelRunnerOutput:
        raise self._error


class BlockTier(Protocol):
    """A store for chunks of KV blocks, documented in `gpu.kv_tiers.tier`. Only `wait` (briefly) and `close` block."""

    key: bytes  # key of the block hashes, so that they are the same after a restart
    blocks_per_chunk: int
    store_seconds: float  # how long storing a chunk delays the steps

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
    def touch(self, names: Sequence[bytes]) -> None: ...  # the chunks of a used prefix, in order
    def discard(self, names: Iterable[bytes]) -> None: ...
    def wait(self) -> None: ...
    def take_stats(self) -> list[TierStats] | None: ...
    def close(self) -> None: ...
