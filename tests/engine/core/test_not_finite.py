"""Numbers that are not finite end the request that they belong to, and nothing that it computed is found again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from engine.core.core import EngineCore
from engine.plan import ModelRunnerOutput, SchedulerOutput
from tests.engine.checked_executor import CheckedExecutor
from tests.engine.core.test_containment import assert_only_these_failed, crowd
from tests.engine.helpers import make_core, make_request, run_to_end, simulated, tokens_of


class NotANumber:
    """An executor whose logits are NaN for some requests, from a number of output tokens on."""

    def __init__(self, executor: CheckedExecutor, from_token: Mapping[str, int]) -> None:
        self.num_blocks = executor.num_blocks
        self.block_size = executor.block_size
        self.vocab_size = executor.vocab_size
        self._executor = executor
        self._from_token = from_token
        self._num_sampled: Counter[str] = Counter()

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> NotANumberStep:
        return NotANumberStep(self._mark(plan, self._executor.submit(plan, abandoned).result()))

    def _mark(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> ModelRunnerOutput:
        for index, (request_id, token_ids) in enumerate(zip(plan.request_ids, output.sampled_token_ids, strict=True)):
            if token_ids:
                if self._num_sampled[request_id] >= self._from_token.get(request_id, 1000):
                    output.not_finite = [*output.not_finite, index]
                self._num_sampled[request_id] += 1
        return output

    def shutdown(self) -> None:
        self._executor.shutdown()


class NotANumberStep:
    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def result(self) -> ModelRunnerOutput:
        return self._output


def core_with_nan(from_token: Mapping[str, int], **options: Any) -> tuple[EngineCore, CheckedExecutor]:
    healthy = make_core(num_blocks=256, max_num_seqs=16, max_num_batched_tokens=256, **options)
    executor = simulated(healthy)
    return EngineCore(healthy.config, NotANumber(executor, from_token)), executor


def test_a_row_of_nan_ends_its_request_alone_and_at_once() -> None:
    core, executor = core_with_nan({"r3": 5, "r9": 0})
    requests = crowd(16)
    for request in requests:
        core.add(request)
    outputs = run_to_end(core)
    core.executor = executor
    assert len(tokens_of(outputs["r3"])) == 5
    assert len(tokens_of(outputs["r9"])) == 0
    assert_only_these_failed(core, requests, outputs, {"r3", "r9"})


@pytest.mark.parametrize("from_token", [0, 10])
def test_what_a_request_of_nan_computed_is_never_found_again(from_token: int) -> None:
    core, executor = core_with_nan({"bad": from_token})
    bad = make_request(range(40), "bad", max_tokens=30)
    core.add(bad)
    outputs = run_to_end(core)
    again = make_request([*range(40), *tokens_of(outputs["bad"])], "again", max_tokens=5)
    core.add(again)
    outputs = run_to_end(core)
    core.executor = executor
    assert outputs["again"][0].num_cached_tokens == 0
    assert executor.computed["again"] == len(again.prompt_token_ids) + 4
    assert_only_these_failed(core, [again], outputs)


def test_who_shares_a_prefix_with_a_request_of_nan_goes_on() -> None:
    core, executor = core_with_nan({"bad": 3})
    requests = [make_request(range(21), name, max_tokens=12) for name in ("good", "bad", "fine")]
    for request in requests:
        core.add(request)
    outputs = run_to_end(core)
    core.executor = executor
    assert_only_these_failed(core, requests, outputs, {"bad"})
