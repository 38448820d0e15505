"""How evenly tokens are spread over the experts of a model, from one telling to the next."""

from __future__ import annotations

from engine.core.executor import STEPS_BETWEEN_EXPERT_LOADS, CountsExperts, Executor


class ExpertLoad:
    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._tokens: list[list[int]] = []  # when it was told before

    def tell(self, num_steps: int) -> list[tuple[int, float]] | None:
        """As `SchedulerStats` has it; None where it is not due, or no token went to an expert."""
        if num_steps % STEPS_BETWEEN_EXPERT_LOADS or not isinstance(self._executor, CountsExperts):
            return None
        before, self._tokens = self._tokens, self._executor.tokens_of_experts()
        before = before or [[0] * len(layer) for layer in self._tokens]
        layers = [
            [now - then for now, then in zip(*pair, strict=True)] for pair in zip(self._tokens, before, strict=True)
        ]
        return [(sum(layer), max(layer) * len(layer) / sum(layer)) for layer in layers if any(layer)] or None
