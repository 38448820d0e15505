"""How much prefill a step may take on beside running streams, so that these keep their pace.

Where decoding alone takes most of the target, prefill may still double a step: streams slow down by that factor at
most, and those who wait get their turn. (With a hard target, 32 users on two cores got half the tokens.)

Owned by the EngineCore.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.scheduler.step_cost import StepCostTable, StepLoad, chunk_keys

MIN_PREFILL_TOKENS = 8  # a prefill always makes progress, whatever the target is
UNMEASURED_PREFILL_TOKENS = 64  # before the first measure
_EXPLORED = 16  # one step in so many gets an eighth more tokens, so that chunks above the table's limit are measured

PacePrefill = Callable[[StepLoad, int], int]
"""`StepBudget.prefill_tokens`."""


class StepBudget:
    """Keeps steps that carry both decodes and prefill near `target_seconds`, by what the table says of them."""

    def __init__(self, table: StepCostTable, max_tokens: int, target_seconds: float) -> None:
        self._table = table
        self._max_tokens = max_tokens
        self._target = target_seconds
        self._asked = 0

    def prefill_tokens(self, decodes: StepLoad, start: int) -> int:
        """How many prefill tokens the next step may carry beside these decodes, from position `start` of a prompt."""
        table = self._table
        if not (table.mixed.is_known or table.prefill.is_known):
            return min(UNMEASURED_PREFILL_TOKENS, self._max_tokens)
        alone = table.cost(StepLoad(decodes.num_decodes, decodes.num_decode_keys))
        affordable = max(self._target - alone, alone)
        fits, too_many = MIN_PREFILL_TOKENS, self._max_tokens + 1
        while too_many - fits > 1:
            tokens = (fits + too_many) // 2
            load = StepLoad(decodes.num_decodes, decodes.num_decode_keys, 1, tokens, chunk_keys(start, tokens))
            if table.cost(load) - alone <= affordable:
                fits = tokens
            else:
                too_many = tokens
        self._asked += 1
        if not self._asked % _EXPLORED:
            fits += fits // 8
        return min(fits, self._max_tokens)
