"""How much prefill a step may take on beside running streams, so that these keep their pace.

The cost of a step is modelled as `decode + tokens * per_token`: `decode` is what a step without prefill takes,
`per_token` what each prefill token adds. Both are measured on the steps themselves, the newest counting most, because
a token costs more the longer the context is. Owned by the EngineCore.
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_PREFILL_TOKENS = 16  # a prefill always gets somewhere, whatever the target
UNMEASURED_PREFILL_TOKENS = 64  # before the first measure

_DECODE_WEIGHT = 0.2  # of the newest step
_PER_TOKEN_WEIGHT = 0.5


class StepBudget:
    """Keeps steps that carry both decodes and prefill near `target_seconds`."""

    def __init__(self, max_tokens: int, target_seconds: float) -> None:
        self._max_tokens = max_tokens
        self._target = target_seconds
        self._decode = 0.0
        self._per_token = 0.0

    @property
    def seconds_per_prefill_token(self) -> float:
        """The latest measure; 0 before the first prefill."""
        return self._per_token

    def prefill_tokens(self) -> int:
        """How many prefill tokens the next step may carry beside decodes."""
        if self._per_token == 0.0:
            return min(UNMEASURED_PREFILL_TOKENS, self._max_tokens)
        affordable = int((self._target - self._decode) / self._per_token)
        return max(MIN_PREFILL_TOKENS, min(affordable, self._max_tokens))

    def observe(self, num_scheduled_tokens: Sequence[int], seconds: float) -> None:
        """Learn from a step that has run with this many tokens for each of its requests."""
        num_prefill_tokens = sum(num_tokens for num_tokens in num_scheduled_tokens if num_tokens > 1)
        if num_prefill_tokens == 0:
            if num_scheduled_tokens:
                self._decode += (seconds - self._decode) * (_DECODE_WEIGHT if self._decode else 1.0)
        elif num_prefill_tokens >= MIN_PREFILL_TOKENS:
            has_decodes = 1 in num_scheduled_tokens
            per_token = max(seconds - (self._decode if has_decodes else 0.0), 0.0) / num_prefill_tokens
            self._per_token += (per_token - self._per_token) * (_PER_TOKEN_WEIGHT if self._per_token else 1.0)
