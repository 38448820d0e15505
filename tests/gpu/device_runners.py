"""Either runner under the real engine, with a small random Llama, and graphs of a device that has none."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.executor import StepHandle
from engine.messages import EngineCoreRequest, FinishReason, SamplingParams
from engine.plan import SchedulerOutput
from gpu.attention import TorchAttention, TritonAttention
from gpu.device.graphs import Replay
from gpu.device.runner import DeviceRunner
from gpu.executor import UniProcExecutor
from gpu.models.decoder import CausalLM
from gpu.models.torch_model import TorchModel
from gpu.runner.host_runner import ModelRunner
from gpu.runner.rows import BatchSizes
from tests.gpu.test_executor import CONFIG, random_weights

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN, MAX_NUM_SEQS = 4, 40, 64, 6
MAX_TOKENS = 14  # in a step
VOCAB_SIZE = CONFIG.vocab_size


class Again:
    """Graphs of a device without graphs."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replayed = 0

    def capture(self, run: Callable[[], None]) -> Replay:
        run()
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            run()

        return replay


class RunnerExecutor:
    """An `engine.executor.Executor` around a runner of either kind."""

    num_blocks, block_size, vocab_size = NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE

    def __init__(self, runner: ModelRunner | DeviceRunner) -> None:
        self.runner = runner
        self.plans: list[SchedulerOutput] = []

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> StepHandle:
        self.plans.append(plan)
        return self.runner.submit(plan, abandoned)

    def shutdown(self) -> None: ...


def make_executor(kind: str, graphs: Again | None = None) -> RunnerExecutor:
    backend = TorchAttention if graphs is None else TritonAttention
    attention = partial(backend, block_size=BLOCK_SIZE)
    model = CausalLM(CONFIG, dtype=torch.float32, device=CPU, max_model_len=MAX_MODEL_LEN, attention=attention)
    model.load_weights(random_weights())
    sizes = BatchSizes(MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE)
    if kind == "host":
        served = TorchModel(model, torch.float32, CPU, block_size=BLOCK_SIZE)
        served.allocate_kv_cache(NUM_BLOCKS)
        return RunnerExecutor(ModelRunner(served, sizes))
    kv_caches = model.allocate_kv_cache(NUM_BLOCKS, torch.float32, CPU)
    runner = DeviceRunner(
        model, kv_caches, sizes, CPU, vocab_size=VOCAB_SIZE, max_num_batched_tokens=MAX_TOKENS, graphs=graphs
    )
    return RunnerExecutor(runner)


def make_core(
    executor: RunnerExecutor | UniProcExecutor, pipeline_depth: int, *, num_blocks: int = NUM_BLOCKS
) -> EngineCore:
    executor.num_blocks = num_blocks
    config = EngineConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        eos_token_ids=(7,),
        pipeline_depth=pipeline_depth,
    )
    return EngineCore(config, executor)


def crowd(seed: int, *, greedy: bool = True, processors: bool = True) -> list[EngineCoreRequest]:
    """Twenty requests of all kinds; every third begins as another one does."""
    draw = random.Random(seed)
    requests = []
    shared = [draw.randrange(VOCAB_SIZE) for _ in range(24)]
    for number in range(20):
        prompt = shared[: draw.randrange(24)] if number % 3 == 0 else []
        prompt = prompt + [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 20))]
        max_tokens = draw.randint(1, 18)
        options: dict[str, Any] = draw.choice(
            [
                {},
                {"ignore_eos": True},
                {"stop_token_ids": tuple(draw.sample(range(VOCAB_SIZE), 40)), "min_tokens": max_tokens // 2},
                {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
                {"presence_penalty": 1.5},
                {"logit_bias": {draw.randrange(VOCAB_SIZE): 8.0, draw.randrange(VOCAB_SIZE): -100.0}},
                {"logprobs": draw.randrange(4)},
            ]
            if processors
            else [{}, {"ignore_eos": True}]
        )
        if not greedy:
            options = {
                "temperature": 0.9,
                **draw.choice([{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.1}]),
                **options,
            }
        requests.append(
            EngineCoreRequest(
                request_id=f"r{number}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "seed": number, **options}),
                arrival_time=0.0,
            )
        )
    return requests


def drive(core: EngineCore, requests: list[EngineCoreRequest]) -> dict[str, tuple[list[int], FinishReason | None]]:
    """Two requests arrive with each step; the fifth leaves in the middle."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    ends: dict[str, FinishReason | None] = dict.fromkeys(tokens)
    logprobs: dict[str, list[object]] = {request.request_id: [] for request in requests}
    waiting = list(requests)
    num_preemptions = num_hits = 0
    for number in itertools.count():
        for request in waiting[:2]:
            core.add(request)
        del waiting[:2]
        if number == 7:
            core.finish_request("r4", FinishReason.ABORT)
        if not (core.has_work or waiting):
            break
        batch = core.step()
        core.scheduler.check_integrity()
        num_preemptions += batch.stats.num_preemptions
        num_hits += batch.stats.prefix_cache_hits
        for output in batch.outputs:
            assert output.error is None
            tokens[output.request_id] += output.new_token_ids
            logprobs[output.request_id] += output.logprobs or []
            ends[output.request_id] = output.finish_reason
    assert num_preemptions > 0
    assert num_hits > 0
    for request in requests:
        if request.sampling.logprobs is not None and request.request_id != "r4":
            assert len(logprobs[request.request_id]) == len(tokens[request.request_id])
    del tokens["r4"], ends["r4"]
    return {name: (tokens[name], ends[name]) for name in tokens}
