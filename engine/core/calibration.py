"""The measurement of step costs while the engine is idle, by made-up steps on free blocks.

Each call makes one step, so a request that arrives waits for one step at most. All steps together take `MAX_SECONDS`:
the most informative shapes come first, three times each. Once three measures allow an estimate, a shape that is
likely to take more than the remaining time is left out. A step during which the thread lost its processor, or that
took more than three times its estimate, is not believed and is repeated, for which `MAX_SECONDS` more are allowed.
The result is a `StepCostTable`; rows and blocks are given back after every step. Owned by the EngineCore.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from engine.clock import Clock
from engine.core.config import EngineConfig
from engine.core.executor import Executor
from engine.core.lost_time import LostTime
from engine.messages import SamplingParams
from engine.scheduler.block_pool import BlockPool
from engine.scheduler.cost_tracker import StepCostTracker
from engine.scheduler.plan import NewRequestData, SchedulerOutput
from engine.scheduler.step_cost import SETTLED, StepLoad, chunk_keys

MADE_UP = "calibration-"  # begins the ids of requests that nobody made
MAX_SECONDS = 2.0
SHORT, LONG = 16, 512  # tokens of context
_PROBED = 128  # tokens of the chunk by which keys and prompts are told apart
_SAMPLING = SamplingParams(temperature=0.7, seed=0)


class Shape(NamedTuple):
    """A made-up step: streams, of so much context each, and prompts, of which so many tokens are computed from
    `start` on."""

    decodes: int = 0
    context: int = SHORT
    prompts: int = 0
    tokens: int = 0
    start: int = 0

    @property
    def load(self) -> StepLoad:
        keys = self.prompts * chunk_keys(self.start, self.tokens)
        return StepLoad(self.decodes, self.decodes * self.context, self.prompts, self.prompts * self.tokens, keys)


class Calibration:
    """The steps that are still to be made. `seconds` is what those that were made have taken."""

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        pool: BlockPool,
        tracker: StepCostTracker,
        lost_time: LostTime,
        clock: Clock,
    ) -> None:
        self.seconds = 0.0
        self._executor = executor
        self._pool = pool
        self._tracker = tracker
        self._lost_time = lost_time
        self._lost = 0.0  # seconds of steps that are repeated
        self._again: Counter[Shape] = Counter()
        self._clock = clock
        self._num_groups = len(config.kv_windows)
        self._length = min(LONG, config.max_model_len - 1)
        self._samples: dict[Shape, list[float]] = {}
        self._took: dict[Shape, float] = {}  # the least of SETTLED samples, by shape
        self._rows = min(8, config.max_num_seqs)
        self._chunk = min(_PROBED, config.max_num_batched_tokens // 2, self._length // 2)
        self._left = deque(self._shapes(config))
        self._first = self._left[0]

    def _shapes(self, config: EngineConfig) -> list[Shape]:
        rows, most = config.max_num_seqs, min(config.max_num_batched_tokens, self._length)
        first = [Shape(1), Shape(prompts=1, tokens=min(64, most)), Shape(rows), Shape(prompts=1, tokens=most)]
        first += [Shape(self._rows), Shape(self._rows, prompts=1, tokens=self._chunk), Shape(prompts=1, tokens=16)]
        first += [Shape(prompts=1, tokens=self._chunk), self._with_keys, self._with_more_keys, self._with_prompts]
        sizes = [2**power for power in range(1, 20)]
        others = [Shape(size) for size in sizes if size < rows]
        others += [Shape(prompts=1, tokens=size) for size in sizes if 16 < size < most]
        others += [Shape(1, prompts=1, tokens=size) for size in sizes if 16 <= size < most]
        shapes = [each for each in dict.fromkeys(first + others) if self._fits(each, config)]
        # The first two shapes give the estimates of the others, so they are measured SETTLED times before any other. No
        # shape is measured three times in a row: if other work delays a step, it may delay the next one, too.
        groups = [shapes[:2], shapes[2:8], *(shapes[first : first + 8] for first in range(8, len(shapes), 8))]
        return [shape for group in groups for shape in SETTLED * group]

    @staticmethod
    def _fits(shape: Shape, config: EngineConfig) -> bool:
        num_tokens = shape.decodes + shape.prompts * shape.tokens
        return (
            0 < num_tokens <= config.max_num_batched_tokens
            and shape.decodes + shape.prompts <= config.max_num_seqs
            and max(shape.context, shape.start + shape.tokens) < config.max_model_len
        )

    @property
    def _with_keys(self) -> Shape:
        return Shape(self._rows, context=self._length)

    @property
    def _with_more_keys(self) -> Shape:
        return Shape(prompts=1, tokens=self._chunk, start=self._length - self._chunk)

    @property
    def _with_prompts(self) -> Shape:
        return Shape(prompts=self._rows, tokens=max(self._chunk // self._rows, 1))

    def step(self) -> bool:
        """Make one step. Returns whether there are more. Raises what the executor raises."""
        while self._left:
            shape = self._left.popleft()
            expected = self._estimate(shape)
            if shape != self._first and self.seconds - self._lost + expected > MAX_SECONDS:
                continue
            self._lost_time.begin()
            took = self._measure(shape)
            self.seconds += took
            was_held_up = self._lost_time.was_held_up(took)
            is_odd = was_held_up or 0.0 < 3 * expected < took
            if is_odd and self._lost < MAX_SECONDS and self._again[shape] < SETTLED:
                self._lost += took
                self._again[shape] += 1
                self._left.appendleft(shape)
            else:
                self._note(shape, took)
            return True
        self._set_rates()
        return False

    def _note(self, shape: Shape, took: float) -> None:
        samples = self._samples.setdefault(shape, [])
        samples.append(took)
        if len(samples) == SETTLED:
            self._took[shape] = least = min(samples)
            if shape.start == 0 and shape.prompts < 2 and shape.context == SHORT:
                for _ in samples:
                    self._tracker.observe(shape.load, least)

    def _estimate(self, shape: Shape) -> float:
        """Return the expected seconds of a step, 0 while there are too few measures to say."""
        table = self._tracker.table
        is_settled = table.prefill.is_settled if shape.prompts else table.decode.is_settled
        return table.cost(shape.load) if is_settled else 0.0

    def _measure(self, shape: Shape) -> float:
        requests, names = [], []
        prompt = shape.start + shape.tokens
        longest = max(shape.context if shape.decodes else 0, prompt)
        count = min(-(-longest // self._executor.block_size) * self._num_groups, self._pool.num_free)
        scratch = self._pool.allocate(count)
        try:
            for number in range(shape.decodes + shape.prompts):
                is_decode = number < shape.decodes
                length, computed = (shape.context, shape.context - 1) if is_decode else (prompt, shape.start)
                names.append(f"{MADE_UP}{number}")
                requests.append(self._request(names[-1], length, computed, is_decode, scratch))
            tokens = [1] * shape.decodes + [shape.tokens] * shape.prompts
            plan = SchedulerOutput.made_up([], requests, names, tokens, [1] * len(names))
            began = self._clock()
            try:
                self._executor.submit(plan).result()
                return self._clock() - began
            finally:
                self._executor.submit(SchedulerOutput.made_up(names, [], [], [], [])).result()
        finally:
            self._pool.release(scratch)

    def _request(self, name: str, length: int, computed: int, is_decode: bool, scratch: list[int]) -> NewRequestData:
        places = -(-length // self._executor.block_size) * self._num_groups
        return NewRequestData(
            request_id=name,
            token_ids=[(7919 * position + 1) % self._executor.vocab_size for position in range(length)],
            num_prompt_tokens=computed if is_decode else length,
            num_computed_tokens=computed,
            block_ids=[scratch[place % len(scratch)] for place in range(places)],
            sampling=_SAMPLING,
            stop_token_ids=[],
        )

    def _set_rates(self) -> None:
        """What keys and prompts cost, from steps that differ in nothing else."""
        table, length, chunk = self._tracker.table, self._length, self._chunk
        plain = Shape(prompts=1, tokens=chunk)
        for more, less, number, rate in (
            (self._with_keys, Shape(self._rows), self._rows * (length - SHORT), "decode_key"),
            (self._with_more_keys, plain, chunk * (length - chunk), "prefill_key"),
            (self._with_prompts, plain, self._rows - 1, "prefill_row"),
        ):
            if more in self._took and less in self._took and number > 0:
                least = self._took[less] / 1000  # so that it can still be corrected
                setattr(table, rate, max(self._took[more] - self._took[less], least) / number)
