"""How much prefill a step may take on beside running streams, so that these keep their pace.

The cost of a step is modelled as `decode + tokens * per_token`: `decode` is what a step without prefill takes,
`per_token` what each prefill token adds. Both are measured on the steps themselves, the newest counting most, because
a token costs more the longer the context is.

Where decoding alone takes most of the target, prefill may still double a step: streams slow down by that factor at
most, and those who wait get their turn. (With a hard target, 32 users on two cores got half the tokens.)

Owned by the EngineCore.
"""

from __future__ import annotations

from collections import deque

MIN_PREFILL_TOKENS = 16  # a prefill always gets somewhere, whatever the target
UNMEASURED_PREFILL_TOKENS = 64  # before the first measure

_DECODE_WEIGHT = 0.2  # of the newest step
_PER_TOKEN_WEIGHT = 0.5
_NUM_SPEEDS = 8  # prefill steps of which the fastest tells what can be hoped for


class StepBudget:
    """Keeps steps that carry both decodes and prefill near `target_seconds`."""

    def __init__(self, max_tokens: int, target_seconds: float) -> None:
        self._max_tokens = max_tokens
        self._target = target_seconds
        self._decode = 0.0
        self._per_token: float | None = None
        self._speeds: deque[float] = deque(maxlen=_NUM_SPEEDS)

    @property
    def seconds_per_prefill_token(self) -> float:
        """The best of the latest measures, without what any step costs; 0 before the first prefill.

        For judging what cannot be done in time. So it is no worse than it must be: one step that was held up, or a
        run of short prompts, would otherwise pass for a device too slow to serve anybody.
        """
        return min(self._speeds, default=0.0)

    def prefill_tokens(self) -> int:
        """How many prefill tokens the next step may carry beside decodes."""
        if self._per_token is None:
            return min(UNMEASURED_PREFILL_TOKENS, self._max_tokens)
        affordable = max(self._target - self._decode, self._decode)
        if affordable >= self._max_tokens * self._per_token:
            return self._max_tokens
        return max(MIN_PREFILL_TOKENS, int(affordable / self._per_token))

    def observe(self, num_prefill_tokens: int, num_decode_tokens: int, seconds: float) -> None:
        """Learn from a step that has run and computed so many tokens."""
        if num_prefill_tokens == 0:
            if num_decode_tokens:
                # One step counts for no more than twice the usual, because it may have been held up by something else.
                newest = min(seconds, 2 * self._decode) if self._decode else seconds
                self._decode += (newest - self._decode) * (_DECODE_WEIGHT if self._decode else 1.0)
        elif num_prefill_tokens >= MIN_PREFILL_TOKENS:
            self._speeds.append(max(seconds - self._decode, 0.0) / num_prefill_tokens)
            decode = self._decode if num_decode_tokens else 0.0
            if self._per_token is None:
                self._per_token = max(seconds - decode, 0.0) / num_prefill_tokens
            elif seconds < decode:
                # Faster with prefill than decodes are held to be without it, so it is this belief that is out of date.
                self._decode = max(seconds - num_prefill_tokens * self._per_token, 0.0)
            else:
                per_token = (seconds - decode) / num_prefill_tokens
                self._per_token += (per_token - self._per_token) * _PER_TOKEN_WEIGHT
