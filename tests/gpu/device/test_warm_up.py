"""What is tried before a device serves: how much memory it says that is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from gpu.device.graphs import Replay
from gpu.device.runner import DeviceRunner
from gpu.device.warm_up import graph_memory, rehearse
from gpu.runner.rows import BatchSizes
from gpu.runner.runner import Runner
from tests.gpu.device_runners import BLOCK_SIZE, VOCAB_SIZE, Again, make_executor


class TakesMemory(Again):
    """The first graph takes a pool, and each something of its own."""

    free = 100_000

    def capture(self, run: Callable[[], None]) -> Replay:
        self.free -= 30 if self.num_captured else 7030
        return super().capture(run)


def test_the_memory_of_all_graphs_is_known_from_two() -> None:
    graphs = TakesMemory()
    runner = make_executor("device", graphs).runner
    assert isinstance(runner, DeviceRunner)
    estimate = graph_memory(runner, lambda: graphs.free)
    assert graphs.num_captured == 2
    while runner.prepare():
        pass
    assert estimate == 100_000 - graphs.free


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize(("num_seqs", "max_model_len", "max_tokens"), [(6, 64, 14), (1, 1, 1), (5, 3, 40), (4, 64, 4)])
def test_the_largest_step_fills_the_budget_and_leaves_nothing_behind(
    kind: str, num_seqs: int, max_model_len: int, max_tokens: int
) -> None:
    executor = make_executor(kind)
    reported: list[tuple[int, int | None]] = []
    sizes = BatchSizes(num_seqs, max_model_len, BLOCK_SIZE)
    rehearse(
        cast(Runner, executor), sizes, max_tokens, VOCAB_SIZE, lambda _, done, total: reported.append((done, total))
    )
    assert reported == [(done, len(executor.plans)) for done in range(len(executor.plans) + 1)]
    largest = max(plan.total_num_scheduled_tokens for plan in executor.plans)
    assert largest == min(max_tokens, num_seqs * max_model_len)
    assert max(sum(plan.num_sampled_tokens) for plan in executor.plans) == min(num_seqs, max_tokens)
    assert len(executor.runner.rows) == 0
