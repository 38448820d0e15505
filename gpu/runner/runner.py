"""The interface of a runner, which takes a plan and returns a token for every position to be sampled.

`gpu.runner.host_runner` keeps the batch on the host and waits for its tokens, which suits a CPU; `gpu.device` keeps it
on the device. The worker chooses one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import StepAbandoned
from engine.executor import StepHandle
from engine.plan import ModelRunnerOutput, SchedulerOutput


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The operator's choices of how a model is run."""

    dtype: str = "auto"  # "float32", "bfloat16", "float16", or "auto": see `gpu.model_loader.load_model`
    quantization: str = "none"  # or "int8", "int4": weights of 16 or 32 bits are rounded
    device: str = "auto"  # "cpu", "cuda", "cuda:1"; "auto" is CUDA if there is a device
    num_threads: int | None = None  # on a CPU; None: one for each core that this process may use
    max_model_len: int | None = None  # None: the model's own, or what the KV cache holds if that is less
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_size: int = 16
    kv_cache_dtype: str = "auto"  # as activations, or "fp8" (E4M3) on CUDA, or "int8" on a CPU
    kv_cache_memory: int | None = None  # bytes; None: chosen from free memory
    kv_cache_share: float = 1.0  # of that choice, on a CPU with several engines
    state_checkpoint_share: float = 0.2  # of the KV cache's memory, for checkpoints of states
    kv_cache_dir: Path | None = None  # the folder of keys and values that outlive the process
    kv_cache_dir_size: int = 0  # bytes
    kv_cache_ram: int = 0  # bytes of the host's memory for blocks that are evicted from the device
    gpu_memory_utilization: float = 0.9  # share of a CUDA device's memory that weights, activations and KV may fill
    # Where the batch is kept: "auto" is on the device if that is a GPU, and else on the host.
    runner: Literal["auto", "host", "device"] = "auto"


class Runner(Protocol):
    """Runs plans in the order given. Not thread-safe."""

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> StepHandle:
        """Start one step, or run it. A plan may hold nothing but diffs; then nothing runs and the output is empty.

        If this raises, no request has advanced, though the diffs may have been applied. It raises StepAbandoned between
        two layers if `abandoned` returns True. Errors that a device reports later are raised by the handle.
        """

    def prepare(self) -> bool:
        """Do one piece of work that makes later steps faster. Returns True if there is more."""


class FinishedStep:
    """The handle of a step that has ended, with an output or an error."""

    def __init__(self, outcome: ModelRunnerOutput | Exception) -> None:
        self._outcome = outcome

    def result(self) -> ModelRunnerOutput:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class StateInputs(NamedTuple):
    """The state slots of a step (`engine.scheduler.checkpoints`): those of the rows, then those of checkpoints."""

    rows: NDArray[np.int64]  # [B]
    begins: list[tuple[int, int]]  # (row, slot): the row begins as a copy of the slot, or with zeros if -1
    saves: dict[int, list[tuple[int, int]]]  # by request: (n, slot), copy the state after n of its tokens


class ModelInputs(NamedTuple):
    """The inputs of a step for a model on the host: B requests, T tokens, one request after the other.

    The first `num_decodes` requests have exactly one token in this step. Entries of `block_tables` past a request's
    length, or before the window of a group (`gpu.kv_cache`), are unspecified.
    """

    input_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    query_start_loc: NDArray[np.int32]  # [B + 1]
    seq_lens: NDArray[np.int32]  # [B], all tokens of a request up to the last one of this step
    block_tables: NDArray[np.int32]  # [groups, B, max_blocks], contiguous
    num_decodes: int
    num_prompt_tokens: NDArray[np.int32]  # [B], the length of a request's prompt
    # [T, hidden], the residual stream of the stage before, which may be overwritten; None on the first stage.
    hidden: NDArray[np.float32] | None = None
    states: StateInputs | None = None  # None in a model without states


class LanguageModel(Protocol):
    """The interface of a model to the host's runner. The model owns its KV cache. R rows."""

    def forward(self, inputs: ModelInputs, cancellation_check: Callable[[], None] | None = None) -> NDArray[np.float32]:
        """Return the last hidden states, [T, hidden]; in a stage of a pipeline before the last, the residual stream.

        Calls `cancellation_check` between layers, or less often; an exception from it ends the pass.
        """

    def compute_logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """[R, hidden] -> [R, vocab], which the caller may overwrite, and the next call may reuse."""

    def most_likely(self, hidden: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """[R, hidden] -> int64 [R], the token with the largest logit, the lowest of several; and bool [R], False where
        logits are not finite."""

    def draw(
        self, logits: NDArray[np.float32], *parameters: NDArray[Any]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Draw tokens, as a `gpu.sampling.sampler.Draw`."""


@dataclass(frozen=True, kw_only=True)
class StageLinks:
    """The transport of activations between stages of a pipeline, float32 [T, hidden] for each step that is run."""

    receive: Callable[[int], NDArray[np.float32]] | None = None  # for this number of tokens; None on the first stage
    send: Callable[[NDArray[np.float32]], None] | None = None  # None on the last stage


NO_LINKS = StageLinks()


class CancellationCheck:
    """Raises StepAbandoned once `abandoned` returns True. `news` is as in `engine.executor.AbortCheck`, or None."""

    def __init__(self, abandoned: Callable[[], bool]) -> None:
        self.abandoned = abandoned
        self.news = getattr(abandoned, "news", None)

    def __call__(self) -> None:
        if self.abandoned():
            raise StepAbandoned("every request of this step has been aborted")


def cancellation_check(abandoned: Callable[[], bool] | None) -> CancellationCheck | None:
    return None if abandoned is None else CancellationCheck(abandoned)
