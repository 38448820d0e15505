"""How much work a request is, before anybody knows how long its answer gets: as long as the latest answers were."""

from __future__ import annotations

from typing import NamedTuple

from engine.scheduler.step_cost import StepCostTable, StepLoad

_ANSWERS = 32  # latest answers that count most
_CHUNK = 128  # tokens: of prefill beside decodes, by which its price is told


class Prices(NamedTuple):
    """What one engine takes for its requests, in seconds."""

    prompt_token: float  # computed beside the decodes
    step: float  # of these decodes alone


class TypicalRequest:
    """The means of the latest requests that ended by themselves, in tokens; 0 while none has."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0.0
        self.num_output_tokens = 0.0

    def learn(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """A request has ended by itself."""
        part = 1 / _ANSWERS if self.num_output_tokens else 1.0
        self.num_output_tokens += (max(num_output_tokens, 1) - self.num_output_tokens) * part
        self.num_prompt_tokens += (num_prompt_tokens - self.num_prompt_tokens) * part

    def part_of_answer(self, max_tokens: int | None) -> float:
        """How much of a typical answer a choice is taken to get that may get so many tokens."""
        return 1.0 if max_tokens is None else min(1.0, max_tokens / max(self.num_output_tokens, 1.0))

    def prices(self, costs: StepCostTable, num_rows: int) -> Prices:
        """By these costs, while so many requests like this one decode."""
        keys = int(num_rows * (self.num_prompt_tokens + self.num_output_tokens / 2))
        step = costs.cost(StepLoad(num_rows, keys))
        chunk_keys = int(_CHUNK * min(self.num_prompt_tokens, _CHUNK) / 2)
        chunk = costs.cost(StepLoad(num_rows, keys, 1, _CHUNK, chunk_keys)) - step
        return Prices(chunk / _CHUNK, step)
