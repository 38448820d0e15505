"""Ranks in processes: what they compute is what one worker computes, and one that goes is named at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.errors import ConfigError, EngineDead, HeadraceError, RankLost, StepAbandoned
from engine.executor import STEPS_BETWEEN_EXPERT_LOADS
from engine.messages import Pooling
from engine.plan import SchedulerOutput, TokenMasks
from gpu.checkpoint import ModelError, open_model
from gpu.executor import UniProcExecutor, load_executor
from gpu.parallel.multiproc import MultiprocExecutor, seconds_without_a_core
from gpu.runner.runner import WorkerOptions
from gpu.sharding import Layout
from tests.gpu.native_builds import needs_library
from tests.gpu.runner.test_rows import plan_of
from tests.gpu.sampling_helpers import new_request
from tests.gpu.test_executor import generate, prompts
from tests.selection import slow_except
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.seconds

OPTIONS = WorkerOptions(device="cpu", max_model_len=64, max_num_seqs=8, block_size=4, num_threads=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny", vocab_size=4096))


def start(
    model: str, options: WorkerOptions = OPTIONS, progress: Callable[..., None] | None = None, **sizes: Any
) -> MultiprocExecutor:
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "enable_expert_parallel": False} | sizes
    files = {"model": model, "cache_dir": None, "load_format": "dummy"}
    report = progress or (lambda phase, done, total: None)
    return MultiprocExecutor(files, options, Layout(**sizes), report, hidden_size=512)  # the widest of them


@pytest.fixture(scope="module")
def ranks(model: str) -> Iterator[MultiprocExecutor]:
    """They live as long as their process, and not as the thread that has started them."""
    with ThreadPoolExecutor(1) as thread:
        executor = thread.submit(start, model).result()
    yield executor
    executor.shutdown()


@pytest.fixture(scope="module")
def alone(model: str) -> UniProcExecutor:
    return load_executor(open_model(model, load_format="dummy"), OPTIONS)


def test_ranks_say_what_one_worker_says(ranks: MultiprocExecutor, alone: UniProcExecutor) -> None:
    for name in (
        "num_blocks",
        "block_size",
        "vocab_size",
        "max_model_len",
        "facts",
    ):
        assert getattr(ranks, name) == getattr(alone, name)
    assert generate(ranks, prompts(), chunk=6) == generate(alone, prompts(), chunk=6)


@pytest.mark.slow
def test_what_is_told_of_the_kv_cache_is_of_all_ranks(tmp_path: Path) -> None:
    model = write_tiny_model(
        tmp_path / "uneven", num_attention_heads=6, num_key_value_heads=3, head_dim=8
    )  # two and one
    executor = start(str(model), replace(OPTIONS, kv_cache_memory=2**20), tensor_parallel_size=2)
    try:
        tokens = executor.num_blocks * executor.block_size
        told = f"KV cache: 768.0 KiB, {executor.num_blocks:,} blocks of 4 tokens: room for {tokens:,} tokens"
        assert told in executor.summary, "the rank with two KV heads has its half full, the other the same blocks"
    finally:
        executor.shutdown()


def test_prompt_log_probabilities_and_embeddings_come_back(ranks: MultiprocExecutor, alone: UniProcExecutor) -> None:
    requests = [
        new_request("a", [5, 6, 7, 8], block_ids=[0, 1], prompt_logprobs=2, logprobs=1),
        msgspec.structs.replace(new_request("b", [9, 10, 11], block_ids=[2]), pooling=Pooling.MEAN),
    ]
    plan = plan_of({"a": 4, "b": 3}, new=requests)
    outputs = [executor.submit(plan).result() for executor in (ranks, alone)]
    assert outputs[0] == outputs[1]
    assert len(outputs[0].prompt_logprobs[0]) == 3
    assert outputs[0].embeddings[1]
    for executor in (ranks, alone):
        executor.submit(plan_of({}, removed=["a", "b"])).result()


class Masks:
    """That arrive late, or fail."""

    def __init__(self, allowed: int | None) -> None:
        self.allowed = allowed

    def result(self) -> TokenMasks:
        time.sleep(0.01)
        if self.allowed is None:
            raise LookupError("no such grammar")
        bits = np.zeros((1, 128), np.uint32)
        bits[0, self.allowed // 32] = 1 << self.allowed % 32
        return TokenMasks(indices=np.array([0]), bits=bits)


def test_masks_follow_their_plan_and_may_fail(ranks: MultiprocExecutor) -> None:
    first = plan_of({"a": 2}, new=[new_request("a", [5, 6], block_ids=[0, 1], temperature=0.0)])
    first.masks = Masks(77)
    assert ranks.submit(first).result().sampled_token_ids == [[77]]
    for _ in range(2):
        failing = plan_of({"a": 1})
        failing.masks = Masks(None)
        with pytest.raises(EngineDead, match="LookupError"):
            ranks.submit(failing).result()
    second = plan_of({"b": 1}, new=[new_request("b", [9], block_ids=[3], temperature=0.0)], removed=["a"])
    second.masks = Masks(99)
    assert ranks.submit(second).result().sampled_token_ids == [[99]]
    ranks.submit(plan_of({}, removed=["b"])).result()


def test_a_profile_begins_and_ends_beside_steps_that_wait_for_their_masks(ranks: MultiprocExecutor) -> None:
    first = plan_of({"a": 2}, new=[new_request("a", [5, 6], block_ids=[0, 1], temperature=0.0)])
    second = plan_of({"b": 2}, new=[new_request("b", [7, 8], block_ids=[2, 3], temperature=0.0)])
    first.masks, second.masks = Masks(77), Masks(99)
    steps = [ranks.submit(first), ranks.submit(second)]
    ranks.start_profile()
    assert ranks.stop_profile()
    assert [step.result().sampled_token_ids for step in steps] == [[[77]], [[99]]]
    ranks.submit(plan_of({}, removed=["a", "b"])).result()


def test_a_step_that_fails_on_all_ranks_fails_alone(ranks: MultiprocExecutor, alone: UniProcExecutor) -> None:
    for _ in range(3):
        with pytest.raises(EngineDead, match="KeyError"):
            ranks.submit(plan_of({"nobody": 1})).result()
    assert generate(ranks, prompts()[:1], chunk=1000) == generate(alone, prompts()[:1], chunk=1000)


def test_several_steps_may_be_in_flight(ranks: MultiprocExecutor) -> None:
    new = new_request("a", list(range(2, 14)), block_ids=list(range(8)), temperature=0.0)
    chunks = [plan_of({"a": 4}, new=[new], going_on=["a"]), plan_of({"a": 4}, going_on=["a"]), plan_of({"a": 4})]
    steps = [ranks.submit(plan) for plan in chunks]
    assert [len(step.result().sampled_token_ids[0]) for step in steps] == [0, 0, 1]
    ranks.submit(plan_of({}, removed=["a"])).result()


def test_what_a_rank_says_is_taken_while_a_long_plan_waits_for_room(ranks: MultiprocExecutor) -> None:
    """It reads on when it has got rid of it: more than a socket holds, as the plan is more than the ring holds."""
    new = new_request("a", list(range(2, 62)), block_ids=list(range(16)), prompt_logprobs=4000)
    steps = [ranks.submit(plan_of({"a": 60}, new=[new])), ranks.submit(plan_of({}, removed=["a", "b" * 5_000_000]))]
    assert len(steps[0].result().prompt_logprobs[0]) == 59
    steps[1].result()


SIGNALS = [(signal.SIGKILL, "killed by SIGKILL"), (signal.SIGSTOP, "stopped by")]


@pytest.mark.slow
def test_loading_tells_how_far_it_is_and_what_cannot_work(model: str) -> None:
    reports: list[tuple[str, int, int | None]] = []
    start(model, progress=lambda *report: reports.append(report)).shutdown()
    phase, done, total = reports[-1]
    assert phase == "Loading weights"
    assert done == total
    with pytest.raises(ConfigError, match="max_model_len"):
        start(model, WorkerOptions(device="cpu", max_model_len=10**6))
    with pytest.raises(ModelError, match="no model"):
        start("/nowhere")


@pytest.mark.parametrize(
    ("phase", "number", "words"),
    slow_except(
        [(phase, *sent) for phase in ("idle", "step", "loading") for sent in SIGNALS],
        ("step", *SIGNALS[0]),
        ("idle", *SIGNALS[1]),
    ),
)
def test_a_rank_that_goes_is_named_at_once(model: str, number: int, words: str, phase: str) -> None:
    before = ranks_left()
    if phase == "loading":

        def kill(*report: Any) -> None:
            for pid in ranks_left() - before:
                os.kill(pid, number)

        with pytest.raises(RankLost, match=f"rank 0 on .* {words}"):
            start(model, progress=kill)
        assert ranks_left() == before
        return
    executor = start(model)
    lost: list[HeadraceError] = []
    told = threading.Event()

    def on_lost(error: HeadraceError) -> None:
        lost.append(error)
        told.set()

    executor.watch(on_lost)
    if phase == "idle":
        os.kill(executor.pids[0], number)
        assert told.wait(60)
    plan = plan_of({"a": 2}, new=[new_request("a", [5, 6], block_ids=[0, 1])])
    if phase == "step":
        plan.masks = KillsMeanwhile(lambda: os.kill(executor.pids[0], number))
    with pytest.raises(RankLost, match=f"rank 0 on {os.uname().nodename} .*{words}"):
        executor.submit(plan).result()
    assert told.wait(60)
    assert [str(error) for error in lost] == [str(executor._error)]
    executor.shutdown()
    assert ranks_left() == before
    with pytest.raises(EngineDead):
        executor.submit(SchedulerOutput.made_up([], [], [], [], [])).result()


class KillsMeanwhile(Masks):
    def __init__(self, kill: Callable[[], None]) -> None:
        super().__init__(5)
        self._kill = kill

    def result(self) -> TokenMasks:
        self._kill()
        return super().result()


def ranks_left() -> set[int]:
    """Ranks' processes that this one has and that have not ended."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"rank_main" in (path / "cmdline").read_bytes():
                found.add(int(path.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "size"), slow_except([("auto", 1), ("float32", 2)], ("auto", 1)))
def test_an_abandoned_step_is_over_and_changes_nothing(tmp_path: Path, dtype: str, size: int) -> None:
    """A prompt so long that it would take a while; where there are several ranks, all stop at the same layer."""
    options = WorkerOptions(dtype=dtype, device="cpu", max_model_len=8192, max_num_batched_tokens=8192, num_threads=1)
    sizes: dict[str, Any] = {"tensor_parallel_size": size, "pipeline_parallel_size": size}
    wide = {"hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 1024, "num_key_value_heads": 2}
    executor = start(str(write_tiny_model(tmp_path / "wide", vocab_size=4096, **wide)), options, **sizes)
    blocks = list(range(512))
    plan = plan_of({"a": 8000}, new=[new_request("a", [7] * 8000, block_ids=blocks)])
    with pytest.raises(StepAbandoned):
        executor.submit(plan, lambda: True).result()
    again = plan_of({"a": 3}, new=[new_request("a", [5, 6, 7], block_ids=[0])], removed=["a"])
    assert len(executor.submit(again, lambda: False).result().sampled_token_ids[0]) == 1
    executor.shutdown()


LAYERS = {"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[MultiprocExecutor, UniProcExecutor]]:
    """A model in four processes, two stages of two ranks, which get 2 + 1 groups of heads; and whole."""
    model = str(write_tiny_model(tmp_path_factory.mktemp("cut") / "cut", vocab_size=4096, **LAYERS))
    options = replace(OPTIONS, dtype="float32")
    executor = start(model, options, tensor_parallel_size=2, pipeline_parallel_size=2)
    yield executor, load_executor(open_model(model, load_format="dummy"), options)
    executor.shutdown()


@pytest.mark.slow
def test_a_model_that_is_cut_both_ways_says_what_it_says_whole(cut: tuple[MultiprocExecutor, UniProcExecutor]) -> None:
    ranks, whole = cut
    assert ranks.pipeline_depth == 2
    assert len(ranks.pids) == 4
    assert generate(ranks, prompts(), chunk=6) == generate(whole, prompts(), chunk=6)


@pytest.mark.slow
def test_stages_work_on_several_steps_and_forget_one_that_fails(
    cut: tuple[MultiprocExecutor, UniProcExecutor],
) -> None:
    """Also where it fails on the last stage alone."""
    ranks, whole = cut
    expected = generate(whole, prompts(), chunk=1000)
    new = [
        new_request(name, [5, 6, 7], block_ids=[each, each + 1], temperature=0.0) for each, name in ((0, "a"), (4, "b"))
    ]
    several = [ranks.submit(plan_of({each.request_id: 3}, new=[each])) for each in new]
    tokens = [step.result().sampled_token_ids[0] for step in several]
    assert tokens[0] == tokens[1]
    with pytest.raises(EngineDead, match="KeyError"):
        ranks.submit(plan_of({"nobody": 1})).result()
    failing = plan_of({"a": 1})
    failing.masks = Masks(None)
    behind = plan_of({"b": 1})
    steps = [ranks.submit(failing), ranks.submit(behind)]
    with pytest.raises(EngineDead, match="LookupError"):
        steps[0].result()
    assert len(steps[1].result().sampled_token_ids[0]) == 1
    ranks.submit(plan_of({}, removed=["a", "b"])).result()
    assert generate(ranks, prompts(), chunk=1000) == expected


TWO_THREADS_ON_ONE_CORE = """
import hashlib, os, threading
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for _ in range(2):
    threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha256", b"", b"", 10**9), daemon=True).start()
print(flush=True)
threading.Event().wait()
"""


def test_a_thread_that_waits_for_a_core_counts_like_the_main_thread_that_waits_for_it() -> None:
    with subprocess.Popen([sys.executable, "-c", TWO_THREADS_ON_ONE_CORE], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        before, deadline = seconds_without_a_core(process.pid), time.monotonic() + 60
        while seconds_without_a_core(process.pid) < before + 0.2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
    assert seconds_without_a_core(process.pid) == 0.0


class WideMasks(Masks):
    """Of more requests than there are, so that they are longer than the ring."""

    def result(self) -> TokenMasks:
        masks = super().result()
        return TokenMasks(indices=np.arange(9000), bits=np.repeat(masks.bits, 9000, axis=0))


@pytest.mark.slow
def test_a_stage_that_writes_much_and_one_that_waits_for_much_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """The last stage reads no activations before it has masks, which the driver writes as fast as all ranks read."""
    wide = {"hidden_size": 512, "head_dim": 16, "num_hidden_layers": 2}
    model = str(write_tiny_model(tmp_path / "wide", vocab_size=4096, max_position_embeddings=9000, **wide))
    options = replace(OPTIONS, max_model_len=9000, max_num_batched_tokens=9000)
    executor = start(model, options, pipeline_parallel_size=2)
    masked = plan_of({"a": 2}, new=[new_request("a", [5, 6], block_ids=[0], temperature=0.0)])
    masked.masks = WideMasks(77)
    long = plan_of({"b": 9000}, new=[new_request("b", [7] * 9000, block_ids=list(range(1, 2251)))])
    steps = [executor.submit(masked), executor.submit(long)]
    assert steps[0].result().sampled_token_ids == [[77]]
    assert len(steps[1].result().sampled_token_ids[0]) == 1
    executor.shutdown()


@pytest.mark.slow
@needs_library
def test_tokens_of_experts_are_those_of_one_worker(tmp_path: Path) -> None:
    """However many ranks have a token's experts, and whoever has its layers."""
    family = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    changes = LAYERS | family | {"num_local_experts": 3, "num_experts_per_tok": 2}
    model = str(write_tiny_model(tmp_path / "experts", vocab_size=4096, **changes))
    ranks = start(model, tensor_parallel_size=2, pipeline_parallel_size=2, enable_expert_parallel=True)
    alone = load_executor(open_model(model, load_format="dummy"), OPTIONS)
    for step in range(STEPS_BETWEEN_EXPERT_LOADS):
        request = new_request(f"r{step}", [step, 2 * step, 3 * step], block_ids=[step % 8])
        for executor in (ranks, alone):
            plan = plan_of({f"r{step}": 3}, new=[request], removed=[f"r{step - 1}"] if step else [])
            executor.submit(plan).result()
    for _ in range(STEPS_BETWEEN_EXPERT_LOADS - 1):
        if ranks.tokens_of_experts():
            break
        ranks.submit(plan_of({})).result()  # a stage may tell it after the last one has told of the step
    tokens = alone.tokens_of_experts()
    assert [sum(layer) for layer in tokens] == [2 * 3 * STEPS_BETWEEN_EXPERT_LOADS] * 3
    assert ranks.tokens_of_experts() == tokens
    ranks.shutdown()


def for_ever(executor: MultiprocExecutor) -> None:
    while True:
        executor.submit(plan_of({"a": 2}, new=[new_request("a", [5, 6], block_ids=[0, 1])])).result()
        executor.submit(plan_of({}, removed=["a"])).result()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 3])
def test_any_rank_of_several_that_goes_is_named(victim: int, tmp_path: Path) -> None:
    model = str(write_tiny_model(tmp_path / "cut", vocab_size=4096, **LAYERS))
    before = ranks_left()
    executor = start(model, replace(OPTIONS, dtype="float32"), tensor_parallel_size=2, pipeline_parallel_size=2)
    os.kill(executor.pids[victim], signal.SIGSTOP if victim else signal.SIGKILL)
    with pytest.raises(RankLost, match=f"rank {victim} on "):
        for_ever(executor)
    executor.shutdown()
    assert ranks_left() == before
