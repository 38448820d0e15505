"""Hypothesis' state machines, until their stories have gone through all that they are told for."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from hypothesis import seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def explore(
    machine: type[RuleBasedStateMachine], seen: Counter[str], events: Sequence[str], *, max_examples: int
) -> None:
    """Tell so many stories, and as many again for as long as one of these events was in none, up to ten times."""
    seen.clear()
    assert settings.default is not None
    for number in range(10):
        again = number if settings.default.derandomize else random.randrange(2**32)
        run_state_machine_as_test(
            seed(again)(machine), settings=settings(max_examples=max_examples, stateful_step_count=20)
        )
        if all(seen[event] for event in events):
            return
    raise AssertionError(f"the stories never went through {[event for event in events if not seen[event]]}")
