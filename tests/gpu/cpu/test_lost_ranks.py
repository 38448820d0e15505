"""No rank of the C path waits for ever for another; and the embedded model on ranks."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.errors import RankLost, StepAbandoned
from gpu.checkpoint import ModelConfig, open_model
from gpu.cpu.communicator import SharedMemoryCommunicator, make_segment
from gpu.cpu.decoder import CPUCausalLM
from gpu.cpu.library import Library, load_library
from gpu.runner.runner import ModelInputs
from gpu.weights.reading import read_weights
from tests.gpu.cpu.test_communicator import LAYOUTS, assert_same, random_model, step
from tests.gpu.cpu.test_decoder import MODELS
from tests.gpu.native_builds import needs_library
from tests.gpu.rank_processes import RankProcesses, Weights, rank_processes

pytestmark = needs_library

LONG = 3600.0  # seconds: where nothing else ends a wait, the test does not end


@pytest.fixture(scope="module")
def library() -> Library:
    library = load_library()
    assert library is not None
    return library


@pytest.fixture(scope="module")
def small() -> tuple[ModelConfig, Weights]:
    return random_model(MODELS["llama"], quantized=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["tp2", *(pytest.param(name, marks=pytest.mark.storm) for name in ("tp3", "tp2-pp2"))]
)
def test_the_embedded_model_on_ranks_is_the_embedded_model(library: Library, layout: str):
    files = open_model("smollm2-135m-instruct")
    assert_same(library, files.config, lambda: read_weights(files), LAYOUTS[layout])


@contextmanager
def in_the_middle(
    library: Library, small: tuple[ModelConfig, Weights], event: Callable[[], None], timeout: float
) -> Iterator[tuple[RankProcesses, ModelInputs]]:
    """Three ranks in a step, in which `event` happens to rank 0 between two layers."""
    config, weights = small
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpu.cpu.decoder.STOP_INTERVAL", 0.0)
        checks = {0: event}
        with rank_processes(library, config, weights, LAYOUTS["tp3"], timeout=timeout, checks=checks.get) as ranks:
            inputs = step(config, (0, 0, 30))
            ranks.send(0, "forward", inputs)
            yield ranks, inputs


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_or_stops_in_a_step_is_named_by_all_others_at_the_deadline(
    library: Library, small: tuple[ModelConfig, Weights], number: signal.Signals
):
    with in_the_middle(library, small, lambda: os.kill(os.getpid(), number), timeout=3) as (ranks, _):
        for rank in (1, 2):
            with pytest.raises(RankLost, match=r"^rank 0 on \S+ did not join"):
                ranks.answer(rank)


def test_who_is_told_of_a_lost_rank_waits_no_more(library: Library, small: tuple[ModelConfig, Weights]):
    with in_the_middle(library, small, lambda: os.kill(os.getpid(), signal.SIGKILL), timeout=LONG) as (ranks, inputs):
        watcher = SharedMemoryCommunicator(library, ranks.segments[0], 0, 3)
        watcher.lose(0)
        for rank in (1, 2):
            with pytest.raises(RankLost, match=r"^rank 0 "):
                ranks.answer(rank)
            ranks.connections[rank].send(("forward", inputs))  # and never again
            with pytest.raises(RankLost, match=r"^rank 0 "):
                ranks.answer(rank)


def test_a_rank_that_fails_in_its_step_ends_the_others_at_once(library: Library, small: tuple[ModelConfig, Weights]):
    config, weights = small

    def need_too_much(rank: int, model: CPUCausalLM) -> None:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_AS, (2**36, 2**36))
            model._layers[0].qkv.rows = 2**31 - 16  # for 30 tokens 257 GB

    with rank_processes(library, config, weights, LAYOUTS["tp3"], timeout=LONG, before=need_too_much) as ranks:
        ranks.send(0, "forward", step(config, (0, 0, 30)))
        with pytest.raises(MemoryError):
            ranks.answer(1)
        for rank in (0, 2):
            with pytest.raises(RankLost, match=r"^rank 1 "):
                ranks.answer(rank)


def test_ranks_agree_on_the_end_of_a_step_that_nobody_wants_and_go_on(
    library: Library, small: tuple[ModelConfig, Weights]
):
    wanted: list[bool] = []

    def first_is_abandoned() -> None:
        if not wanted:
            wanted.append(True)
            raise StepAbandoned("nobody")

    with in_the_middle(library, small, first_is_abandoned, timeout=LONG) as (ranks, inputs):
        for rank in range(3):
            with pytest.raises(StepAbandoned):
                ranks.answer(rank)
        assert ranks.forward(inputs).shape == (30, 96)


def test_a_rank_that_left_out_a_call_is_not_taken_for_one_that_made_it(
    library: Library, small: tuple[ModelConfig, Weights]
):
    config, weights = small
    with rank_processes(library, config, weights, LAYOUTS["tp2"], timeout=LONG) as ranks:
        ranks.connections[0].send(("forward", step(config, (0, 0, 9))))
        ranks.connections[1].send(("forward", step(config, (0, 9, 9))))
        for rank in range(2):
            with pytest.raises(RankLost, match=r"^rank \d on "):
                ranks.answer(rank)


def test_a_lost_rank_of_a_later_stage_is_named_as_the_world_counts(library: Library):
    segment = make_segment()
    communicator = SharedMemoryCommunicator(Library(library.name, library.path), segment, 0, 2, LONG, first=2)
    communicator.lose(1)
    with pytest.raises(RankLost, match=rf"^rank 3 on {os.uname().nodename} ") as lost:
        communicator.barrier()
    assert lost.value.rank == 3
    os.close(segment)


def test_a_step_of_more_tokens_than_there_is_room_for_is_refused(library: Library, small: tuple[ModelConfig, Weights]):
    config, weights = small
    with rank_processes(library, config, weights, LAYOUTS["tp2"], max_num_batched_tokens=8) as ranks:
        ranks.send(0, "forward", step(config, (0, 0, 9)))
        with pytest.raises(ValueError, match="a step has 9 tokens; the ranks have room for 8"):
            ranks.answer(0)


def test_memory_that_ranks_share_is_taken_before_it_is_touched(library: Library):
    segment = make_segment()
    communicator = SharedMemoryCommunicator(library, segment, 0, 2)
    assert len(communicator.room(3_000_001)) >= 3_000_001
    made = os.fstat(segment)
    assert 512 * made.st_blocks >= made.st_size > 3_000_001
    os.close(segment)


def test_sums_are_added_up_in_the_ranks_order_and_parts_lie_side_by_side(library: Library):
    segment, counts = make_segment(), (3, 576, 70_001)  # the last more than goes through the segment at a time
    given = [
        [np.random.default_rng(rank).normal(size=count).astype(np.float32) for count in counts] for rank in range(3)
    ]

    def work(rank: int) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        communicator = SharedMemoryCommunicator(library, segment, rank, 3, LONG)
        results = []
        for values in given[rank]:
            summed = values.copy()
            communicator.all_reduce_(summed)
            sizes = [len(values) - r for r in range(3)]
            results.append((summed, communicator.all_gather(values[: sizes[rank]], sizes)))
            communicator.barrier()
        return results

    with ThreadPoolExecutor(3) as threads:
        for results in threads.map(work, range(3)):
            for (summed, gathered), parts in zip(results, zip(*given, strict=True), strict=True):
                assert np.array_equal(summed, parts[0] + parts[1] + parts[2])
                assert np.array_equal(gathered, np.concatenate([part[: len(part) - r] for r, part in enumerate(parts)]))
    os.close(segment)
