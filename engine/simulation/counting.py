"""An executor that counts tokens instead of computing them, the seconds of its steps, and a virtual clock."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

import numpy as np

from engine.config import Clock
from engine.costs.table import SETTLED, SPREAD_BOUNDS, Curve, Spread, StepCostTable, StepLoad, chunk_keys
from engine.executor import StepHandle
from engine.plan import ModelRunnerOutput, SchedulerOutput

StepCost = Callable[[StepLoad], float]
"""Returns the seconds of a step, as `StepCostTable.cost` does."""

VOCAB_SIZE = 2**32  # tokens are arbitrary numbers; a block's hash takes 32 bits


class SimulatedStep:
    """The handle of a step that ends at a certain time."""

    def __init__(self, output: ModelRunnerOutput, wait: Callable[[], None]) -> None:
        self._output = output
        self._wait = wait

    def result(self) -> ModelRunnerOutput:
        self._wait()
        return self._output


class CountingExecutor:
    """An `engine.executor.Executor` that returns `sampling.seed` + n as the n-th output token of a request.

    If requests have different seeds, their answers are known in advance and differ, so the prefix cache is hit as often
    as with real tokens. One plan can stand for several steps that only decode, by sampling several tokens of each
    request: `foresee` computes their end times before the plan is made, and `ends` has them afterwards.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        cost: StepCost,
        *,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = VOCAB_SIZE
        self.cost = cost
        self.pipeline_depth = 1
        self.busy_seconds = 0.0  # of all steps
        self.row_seconds = 0.0  # the sum of seconds * requests over all steps
        self._clock = clock
        self._sleep = sleep
        self.num_steps = 0
        self.ends: list[float] = []  # of the steps of the latest plan
        self._foreseen: list[float] = []
        self._busy_until = 0.0
        self._computed: dict[str, int] = {}  # tokens of each request that are computed
        self._next: dict[str, int] = {}  # the next token of each request

    def foresee(self, num_rows: int, num_keys: int, most: int, horizon: float) -> int:
        """Return how many steps, at most `most`, begin before `horizon` if these rows decode from now on. The next plan
        must consist of these steps."""
        ends, end = self._foreseen, max(self._busy_until, self._clock())
        while len(ends) < most and end < horizon:
            end += self.cost(StepLoad(num_rows, num_keys))
            num_keys += num_rows
            ends.append(end)
        return len(ends)

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> StepHandle:
        computed, following = self._computed, self._next
        for request_id in plan.removed_request_ids:
            computed.pop(request_id, None)
            following.pop(request_id, None)
        for new in plan.new_requests:
            computed[new.request_id] = new.num_computed_tokens
            following[new.request_id] = (new.sampling.seed or 0) + len(new.token_ids) - new.num_prompt_tokens
        sampled: list[list[int]] = []
        decodes = decode_keys = prefills = prefill_tokens = prefill_keys = 0
        scheduled = zip(plan.request_ids, plan.num_scheduled_tokens, plan.num_sampled_tokens, strict=True)
        for request_id, num_tokens, num_sampled in scheduled:
            start = computed[request_id]
            computed[request_id] = start + num_tokens
            if num_tokens == num_sampled == 1:  # mostly
                decodes += 1
                decode_keys += start + 1
            elif num_tokens == num_sampled:
                decodes += num_tokens
                decode_keys += chunk_keys(start, num_tokens)
            else:
                prefills += 1
                prefill_tokens += num_tokens
                prefill_keys += chunk_keys(start, num_tokens)
            token_id = following[request_id]
            following[request_id] = token_id + num_sampled
            sampled.append([token_id] if num_sampled == 1 else list(range(token_id, token_id + num_sampled)))
        began = max(self._busy_until, self._clock())
        self.ends, self._foreseen = self._foreseen, []
        if not self.ends:
            load = StepLoad(decodes, decode_keys, prefills, prefill_tokens, prefill_keys)
            self.ends.append(began + self.cost(load) if sampled else began)
        self._busy_until = end = self.ends[-1]
        self.num_steps += len(self.ends)
        self.busy_seconds += end - began
        self.row_seconds += (end - began) * len(sampled)
        output = ModelRunnerOutput(sampled_token_ids=sampled, logprobs={})
        return SimulatedStep(output, lambda: self._sleep(end - self._clock()))

    def shutdown(self) -> None: ...


# A size with fewer steps has the spread of all sizes of its curve; a curve with fewer steps has none.
ENOUGH, FEW = 100, 20
_NUM_QUANTILES = 4096


class DrawnCosts:
    """A `StepCost` that draws seconds from the spread of a table around its costs, in the order of the steps. Equal
    seeds give equal draws. A table without a spread gives its costs themselves.

    It counts the seconds of steps of sizes that were never measured, or are larger than the largest size.
    """

    def __init__(self, table: StepCostTable, seed: int) -> None:
        self._table = table
        self._draw = random.Random(f"{seed} steps").random
        curves = {"decode": table.decode, "prefill": table.prefill, "mixed": table.mixed}
        self._known = {id(curve): (name, _ratios(table, curve)) for name, curve in curves.items()}
        self.has_spread = any(any(ratios) for _, ratios in self._known.values())
        self.seconds = 0.0
        self.unmeasured: dict[str, tuple[float, int]] = {}  # seconds, and the largest such size, by curve

    def __call__(self, load: StepLoad) -> float:
        seconds = self._table.cost(load)
        curve, size = self._table.curve_of(load)
        index = curve.nearest(size)
        name, ratios = self._known[id(curve)]
        if quantiles := ratios[index]:
            seconds *= quantiles[int(self._draw() * len(quantiles))]
        self.seconds += seconds
        if curve.counts[index] < SETTLED or size > 1.5 * curve.sizes[-1]:
            so_far, largest = self.unmeasured.get(name, (0.0, 0))
            self.unmeasured[name] = so_far + seconds, max(largest, size)
        return seconds


def _ratios(table: StepCostTable, curve: Curve) -> list[list[float]]:
    """Return for each size equally likely ratios of seconds to the present cost, none if the curve has no spread."""

    def of(spread: Spread, count: int) -> list[float]:
        shares = np.cumsum([0, *spread.bins]) / sum(spread.bins)
        logarithms = np.interp((np.arange(count) + 0.5) / count, shares, SPREAD_BOUNDS)
        then_by_now = spread.cost / max(table.cost(StepLoad._make(spread.load)), 1e-9)
        return [math.exp(each) * min(max(then_by_now, 1e-3), 1e3) for each in logarithms]

    counts = [sum(each.bins) for each in curve.spread]
    of_all = []
    for spread, count in zip(curve.spread, counts, strict=True):
        if count and sum(counts) >= FEW:
            of_all += of(spread, -(-_NUM_QUANTILES * count // sum(counts)))
    sizes = zip(curve.spread, counts, strict=True)
    return [of(spread, _NUM_QUANTILES) if count >= ENOUGH else of_all for spread, count in sizes]


class VirtualClock:
    """An `engine.config.Clock` that advances only through `sleep`, which returns at once. Not thread-safe."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(0.0, seconds)
