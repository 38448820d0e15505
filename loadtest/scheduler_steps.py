"""Measure the cost of a step without the model: schedule and bookkeeping, for a batch of decoding requests.

    python -m loadtest.scheduler_steps [--running 256] [--steps 400] [--depth 1] [--publish]

Runs an EngineCore over an executor that computes nothing, in this process, and prints the microseconds of
`Scheduler.schedule` and `Scheduler.update` per step, and of the whole step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from engine.commands import PublishKVEvents
from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.messages import EngineCoreRequest, SamplingParams
from engine.plan import ModelRunnerOutput, SchedulerOutput

PROMPT_TOKENS = 32


class NullExecutor:
    """Every token is 7."""

    num_blocks = 2**17
    block_size = 16
    vocab_size = 1000

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> NullStep:
        return NullStep(len(plan.request_ids))

    def shutdown(self) -> None: ...


class NullStep:
    """A step in which everybody samples."""

    def __init__(self, num_sampled: int) -> None:
        self._num_sampled = num_sampled

    def result(self) -> ModelRunnerOutput:
        return ModelRunnerOutput(sampled_token_ids=[[7] for _ in range(self._num_sampled)], logprobs={})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--depth", type=int, default=1, help="steps in flight")
    parser.add_argument("--publish", action="store_true", help="what comes into the prefix cache, as for a router")
    options = parser.parse_args()
    config = EngineConfig(
        max_model_len=4096,
        max_num_seqs=options.running,
        max_num_batched_tokens=2**20,
        pipeline_depth=options.depth,
    )
    core = EngineCore(config, NullExecutor())
    if options.publish:
        core.carry_out(PublishKVEvents(b"key"))
    for number in range(options.running):
        sampling = SamplingParams(temperature=0, max_tokens=options.steps + 2, ignore_eos=True, seed=0)
        prompt = [number] * (PROMPT_TOKENS + number % 16)  # so that every step fills some blocks
        core.add(
            EngineCoreRequest(
                request_id=f"request-{number}", prompt_token_ids=prompt, sampling=sampling, arrival_time=0
            )
        )
    core.step()
    took: dict[str, list[float]] = {"schedule": [], "update": [], "step": []}
    for name in ("schedule", "update"):
        setattr(core.scheduler, name, _timed(getattr(core.scheduler, name), took[name]))
    step = _timed(core.step, took["step"])
    for _ in range(options.steps):
        step()
    per_step = {name: statistics.median(seconds) * 1e6 for name, seconds in took.items()}
    mean = statistics.fmean(took["step"]) * 1e6
    print(f"{options.running} running, median of {options.steps} steps, microseconds:", end=" ")
    print(", ".join(f"{name} {value:.0f}" for name, value in per_step.items()), end="; ")
    print(f"schedule + update {per_step['schedule'] + per_step['update']:.0f}; mean step {mean:.0f}")


def _timed(function: Callable[..., object], took: list[float]) -> Callable[..., object]:
    def timed(*arguments: object, **keywords: object) -> object:
        started = time.thread_time()
        try:
            return function(*arguments, **keywords)
        finally:
            took.append(time.thread_time() - started)

    return timed


if __name__ == "__main__":
    main()
