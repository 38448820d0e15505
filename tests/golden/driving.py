"""An engine core over a real executor, driven step by step, with everything that it planned on record."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from app import library
from engine.core.core import EngineCore
from engine.executor import BlockTier, Executor, StepHandle
from engine.frontend.llm import LLM
from engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, TokenLogprobs
from engine.plan import SchedulerOutput


class RecordedExecutor:
    """A real executor that remembers its plans, and that may say it has fewer blocks than it has."""

    tier: BlockTier | None = None  # tests set one

    def __init__(self, executor: Executor, num_blocks: int | None = None) -> None:
        self._executor = executor
        self.num_blocks = num_blocks or executor.num_blocks
        self.block_size = executor.block_size
        self.vocab_size = executor.vocab_size
        self.plans: list[SchedulerOutput] = []

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> StepHandle:
        self.plans.append(plan)
        return self._executor.submit(plan, abandoned)

    def shutdown(self) -> None:
        raise AssertionError("the executor is shared")


def fresh_core(core: EngineCore, *, num_blocks: int | None = None, **config: Any) -> EngineCore:
    """A core with nothing cached and other limits, over the loaded model of `core`, which must be idle."""
    assert not core.has_work
    executor = core.executor._executor if isinstance(core.executor, RecordedExecutor) else core.executor
    return EngineCore(dataclasses.replace(core.config, **config), RecordedExecutor(executor, num_blocks), core.grammars)


@contextmanager
def float32_llm(model: Path, max_model_len: int) -> Iterator[LLM]:
    """The model in float32 on the CPU, as oracles have it."""
    threads = torch.get_num_threads()
    llm = library.LLM(
        str(model),
        progress=False,
        dtype="float32",
        device="cpu",
        max_model_len=max_model_len,
        max_num_seqs=20,
        num_threads=1,  # as two files run at a time, two threads of torch would wait for each other
        target_inter_token_latency=60.0,  # so that no plan depends on the clock
    )
    yield llm
    llm.core.shutdown()
    torch.set_num_threads(threads)


def fresh_llm(llm: LLM, *, num_blocks: int | None = None, **config: Any) -> LLM:
    """The same for the offline front door."""
    return LLM(fresh_core(llm.core, num_blocks=num_blocks, **config), llm.tokenizer, seed=0)


def plans_of(core: EngineCore) -> list[dict[str, int]]:
    """Who ran in each step, in batch order, and for how many tokens."""
    assert isinstance(core.executor, RecordedExecutor)
    return [
        dict(zip(plan.request_ids, plan.num_scheduled_tokens, strict=True))
        for plan in core.executor.plans
        if plan.request_ids
    ]


@dataclass
class Story:
    """What became of the requests of one drive."""

    outputs: dict[str, list[EngineCoreOutput]] = field(default_factory=lambda: defaultdict(list))
    num_preemptions: int = 0

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.new_token_ids]

    def logprobs(self, request_id: str) -> list[TokenLogprobs]:
        return [entry for output in self.outputs[request_id] for entry in output.logprobs or ()]

    def num_cached_tokens(self, request_id: str) -> int:
        return next(output.num_cached_tokens for output in self.outputs[request_id] if output.new_token_ids)


def drive(
    core: EngineCore,
    arrivals: Mapping[int, Sequence[EngineCoreRequest]] | Sequence[EngineCoreRequest],
    leaving: Mapping[int, str] | None = None,
    max_steps: int = 500,
) -> Story:
    """Step until nothing is left. Requests arrive before the step of their number, clients leave before theirs."""
    arrivals = dict(arrivals) if isinstance(arrivals, Mapping) else {0: arrivals}
    leaving = dict(leaving or {})
    story = Story()
    for number in range(max_steps):
        for request in arrivals.pop(number, ()):
            core.add(request)
        if number in leaving:
            core.finish_request(leaving.pop(number), FinishReason.ABORT)
        if not (core.has_work or arrivals):
            assert not leaving
            return story
        batch = core.step()
        core.scheduler.check_integrity()
        story.num_preemptions += batch.stats.num_preemptions
        for output in batch.outputs:
            story.outputs[output.request_id].append(output)
            assert output.error is None
    raise AssertionError(f"still work to do after {max_steps} steps")
