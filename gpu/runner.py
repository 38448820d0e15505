"""The runner: one plan in, a token for every position of it that is to be sampled. What its two kinds have in common.

`gpu.model_runner` keeps the batch on the host and waits for its tokens, which suits a CPU; `gpu.device` keeps it on the
device. The worker chooses and makes one, and whoever uses it does not ask which.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from engine.core.executor import StepHandle
from engine.errors import StepAbandoned
from engine.scheduler.plan import ModelRunnerOutput, SchedulerOutput
from gpu.attention import AttentionMetadata


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
    """A step as the model sees it: T tokens, one request after the other."""

    input_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    metadata: AttentionMetadata


class LanguageModel(Protocol):
    """What a runner needs of a model. R rows."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: list[torch.Tensor],
        cancellation_check: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """The last hidden states, [T, hidden]; the first three arguments are `ModelInputs`.

        Calls `cancellation_check` between layers; what it raises ends the pass.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, vocab], in any float dtype."""
        ...


@runtime_checkable
class PicksTokens(Protocol):
    """A model that finds the token of the largest logit faster than it computes all logits."""

    def most_likely(self, hidden: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """[R, hidden] -> int64 [R], the lowest of several; and bool [R], False where logits are not finite."""
        ...


def cancellation_check(abandoned: Callable[[], bool] | None) -> Callable[[], None] | None:
    """What ends a step that nobody wants any more."""
    if abandoned is None:
        return None

    def check() -> None:
        if abandoned():
            raise StepAbandoned("every request of this step has been aborted")

    return check
