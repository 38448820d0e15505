"""The runner: one plan in, a token for every position of it that is to be sampled. What its two kinds have in common.

`gpu.runner.host_runner` keeps the batch on the host and waits for its tokens, which suits a CPU; `gpu.device` keeps it
on the device. The worker chooses and makes one, and whoever uses it does not ask which.
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
    """How a model is run, as the operator chose it."""

    dtype: str = "auto"  # "float32", "bfloat16", "float16", or "auto": see `gpu.model_loader.load_model`
    quantization: str = "none"  # or "int8", "int4": of weights that come in 16 or 32 bits
    device: str = "auto"  # "cpu", "cuda", "cuda:1"; "auto" is CUDA where there is one
    num_threads: int | None = None  # that compute on a CPU; None: one for each core that this process may use
    max_model_len: int | None = None  # None: the model's own, or what the KV cache holds if that is less
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_size: int = 16
    kv_cache_memory: int | None = None  # bytes; None: chosen from what is free
    kv_cache_share: float = 1.0  # of that choice on a CPU, where several engines share the memory
    kv_cache_dir: Path | None = None  # where keys and values are kept that outlive the process
    kv_cache_dir_size: int = 0  # bytes
    kv_cache_ram: int = 0  # bytes of the host's memory for what a device's own does not hold
    gpu_memory_utilization: float = 0.9  # share of a CUDA device's memory that weights, activations and KV may fill
    # Where the batch is kept (see `gpu.device`): "auto" is on the device if that is a card, and else on the host.
    runner: Literal["auto", "host", "device"] = "auto"


class Runner(Protocol):
    """Runs plans in the order given. Not thread-safe."""

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> StepHandle:
        """Start one step, or run it. A plan may hold nothing but diffs; then nothing runs and the output is empty.

        If this raises, no request has advanced, though the diffs may have been applied. It raises StepAbandoned between
        two layers if `abandoned` says that nobody wants the step any more. What a device reports late is raised by the
        handle.
        """
        ...

    def prepare(self) -> bool:
        """Do a piece of what makes later steps faster. Returns whether there is more of it."""
        ...


class FinishedStep:
    """The handle of a step that is over, well or badly."""

    def __init__(self, outcome: ModelRunnerOutput | Exception) -> None:
        self._outcome = outcome

    def result(self) -> ModelRunnerOutput:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class ModelInputs(NamedTuple):
    """A step as a model on the host sees it: B requests, T tokens, one request after the other.

    The first `num_decodes` requests have exactly one token in this step. Entries of `block_tables` past a request's
    length mean nothing, nor do those behind the window of a group (`gpu.kv_cache`).
    """

    input_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    query_start_loc: NDArray[np.int32]  # [B + 1]
    seq_lens: NDArray[np.int32]  # [B], all tokens of a request up to the last one of this step
    block_tables: NDArray[np.int32]  # [groups, B, max_blocks], contiguous
    num_decodes: int
    num_prompt_tokens: NDArray[np.int32]  # [B], how many of a request's tokens are its prompt
    # [T, hidden], the residual stream of the stage before, which may be overwritten; None on the first stage.
    hidden: NDArray[np.float32] | None = None


class LanguageModel(Protocol):
    """What the host's runner needs of a model, which owns its KV cache. R rows."""

    def forward(self, inputs: ModelInputs, cancellation_check: Callable[[], None] | None = None) -> NDArray[np.float32]:
        """The last hidden states, [T, hidden]; of a stage of a pipeline that is not the last, its residual stream.

        Calls `cancellation_check` between layers, or more seldom; what it raises ends the pass.
        """
        ...

    def compute_logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """[R, hidden] -> [R, vocab], which the caller may write to, and the next call may use again."""
        ...

    def most_likely(self, hidden: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """[R, hidden] -> int64 [R], the token of the largest logit, the lowest of several; and bool [R], False where
        logits are not finite."""
        ...

    def draw(
        self, logits: NDArray[np.float32], *parameters: NDArray[Any]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """A `gpu.sampling.sampler.Draw`."""
        ...


@dataclass(frozen=True, kw_only=True)
class StageLinks:
    """How activations get from stage to stage of a pipeline, float32 [T, hidden] for each step that is run."""

    receive: Callable[[int], NDArray[np.float32]] | None = None  # of so many tokens; None on the first stage
    send: Callable[[NDArray[np.float32]], None] | None = None  # None on the last stage


NO_LINKS = StageLinks()


def cancellation_check(abandoned: Callable[[], bool] | None) -> Callable[[], None] | None:
    """What ends a step that nobody wants any more."""
    if abandoned is None:
        return None

    def check() -> None:
        if abandoned():
            raise StepAbandoned("every request of this step has been aborted")

    return check
