"""The engine offline, with random weights: decode steps, prefill, the nano-vllm workload, the host's part of a step."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.messages import EngineCoreRequest, FinishReason, SamplingParams
from gpu.checkpoint import ModelConfig
from gpu.executor import UniProcExecutor
from gpu.runner.runner import WorkerOptions
from gpu.weights.tensors import drawn_on
from gpu.worker import Worker
from loadtest.gpu_parts.report import Report
from loadtest.gpu_parts.rooflines import Card, ModelWork


@dataclass(frozen=True)
class Sizes:
    """The sizes of all measures."""

    batches: tuple[int, ...] = (1, 8, 64, 256)
    context: int = 1024
    decode_steps: int = 48
    prefill_tokens: int = 16384
    prompt_tokens: int = 1024
    max_num_batched_tokens: int = 16384
    nano_requests: int = 256
    nano_tokens: tuple[int, int] = (100, 1024)
    max_model_len: int = 4096

    @staticmethod
    def tiny() -> Sizes:
        return Sizes((1, 4), 32, 4, 64, 16, 64, 6, (4, 12), 256)


@dataclass(frozen=True)
class Loaded:
    """A model on the device, behind an engine."""

    name: str
    work: ModelWork
    core: EngineCore
    device: torch.device

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        sampling = SamplingParams(temperature=0.6, max_tokens=max_tokens, ignore_eos=True, seed=len(prompt))
        self.core.add(
            EngineCoreRequest(
                request_id=request_id, prompt_token_ids=prompt, sampling=sampling, arrival_time=time.monotonic()
            )
        )

    def prompt(self, rng: random.Random, length: int) -> list[int]:
        return [rng.randrange(self.work.config.vocab_size) for _ in range(length)]

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def drain(self) -> None:
        """Step until nothing is left."""
        while self.core.has_work:
            self.core.step()
        self.synchronize()


@contextmanager
def loaded(name: str, config: ModelConfig, device: torch.device, sizes: Sizes) -> Iterator[Loaded]:
    """Build, fill with random weights made on the device, and let the executor prepare (capture its graphs)."""
    options = WorkerOptions(
        device=str(device),
        dtype="auto" if device.type == "cuda" else "float32",
        max_model_len=sizes.max_model_len,
        max_num_seqs=max(sizes.batches),
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        kv_cache_memory=None if device.type == "cuda" else 2**25,
    )
    executor = UniProcExecutor(Worker(config, drawn_on(config, str(device)), options), config.vocab_size)
    # Whole steps: no target latency, which would split prompts while streams decode.
    engine_config = EngineConfig(
        max_model_len=sizes.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        target_inter_token_latency=3600.0,
        enable_prefix_caching=False,
        pipeline_depth=getattr(executor, "pipeline_depth", 1),
    )
    core = EngineCore(engine_config, executor)
    try:
        while executor.prepare():
            pass
        yield Loaded(name, ModelWork(config), core, device)
    finally:
        core.shutdown()


def decode_steps(report: Report, model: Loaded, card: Card, sizes: Sizes) -> None:
    """Milliseconds per step when everybody decodes, and what the host does in one."""
    for batch in sizes.batches:
        rng = random.Random(batch)
        # Half of the measured tokens are made before the context is reached, half after.
        prompt_len = sizes.context - sizes.decode_steps // 2
        for number in range(batch):
            model.add(f"d{batch}-{number}", model.prompt(rng, prompt_len), 2 * sizes.decode_steps + 64)
        _step_until_all_decode(model.core, batch)
        host = _HostTimes(model.core)
        model.synchronize()
        started = time.perf_counter()
        num_tokens = 0
        for _ in range(sizes.decode_steps):
            num_tokens += sum(len(output.new_token_ids) for output in model.core.step().outputs)
        model.synchronize()
        milliseconds = (time.perf_counter() - started) / (num_tokens / batch) * 1e3
        host.restore()
        floor = model.work.decode_floor(card, batch, sizes.context) * 1e3
        report.add(model.name, f"decode step, {batch} x {sizes.context}", milliseconds, "ms", floor)
        report.add(model.name, f"host time of a step, {batch} running", host.per_step() * 1e6, "us")
        if model.device.type == "cuda":
            try:
                idle = _idle_per_step(model.core)
                report.add(model.name, f"device idle in a step, {batch} running", idle * 1e6, "us")
            except RuntimeError as problem:  # some machines do not permit tracing
                report.note(f"{model.name}: idle time was not measured: {problem}")
        for number in range(batch):
            model.core.finish_request(f"d{batch}-{number}", FinishReason.ABORT)
        model.drain()


def prefill(report: Report, model: Loaded, card: Card, sizes: Sizes) -> None:
    """The share of the card's matrix rate that whole prompts reach (model FLOPs utilization, of the measured rate)."""
    rng = random.Random(0)
    count = max(1, sizes.prefill_tokens // sizes.prompt_tokens)
    seconds = []
    for attempt in range(3):
        for number in range(count):
            model.add(f"p{attempt}-{number}", model.prompt(rng, sizes.prompt_tokens), 1)
        model.synchronize()
        started = time.perf_counter()
        model.drain()
        seconds.append(time.perf_counter() - started)
    best = statistics.median(seconds[1:])
    flops = model.work.prefill_flops(count, sizes.prompt_tokens)
    name = f"prefill, {count} x {sizes.prompt_tokens}"
    report.add(model.name, name, flops / best / 1e12, "TFLOP/s", card.flops / 1e12)
    report.add(model.name, f"{name}, tokens", count * sizes.prompt_tokens / best, "tok/s")


def nano_lengths(sizes: Sizes) -> list[tuple[list[int], int]]:
    """nano-vllm's benchmark: seed 0, prompts and outputs of 100 to 1024 tokens each; token ids up to 10,000."""
    rng = random.Random(0)
    low, high = sizes.nano_tokens
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(low, high))] for _ in range(sizes.nano_requests)]
    return [(prompt, rng.randint(low, high)) for prompt in prompts]


def nano_offline(report: Report, model: Loaded, card: Card, sizes: Sizes) -> None:
    """Output tokens per second of that workload, everything queued at the start."""
    requests = nano_lengths(sizes)
    vocab_size = model.work.config.vocab_size
    model.synchronize()
    started = time.perf_counter()
    for number, (prompt, max_tokens) in enumerate(requests):
        model.add(f"n-{number}", [token % vocab_size for token in prompt], max_tokens)
    num_tokens = 0
    while model.core.has_work:
        num_tokens += sum(len(output.new_token_ids) for output in model.core.step().outputs)
    model.synchronize()
    seconds = time.perf_counter() - started
    wanted = sum(max_tokens for _, max_tokens in requests)
    if num_tokens != wanted:
        report.fail(f"{model.name}: the offline workload gave {num_tokens} tokens instead of {wanted}")
    floor = model.work.throughput_floor(card, [(len(prompt), output) for prompt, output in requests])
    report.add(model.name, "nano-vllm workload, offline", num_tokens / seconds, "tok/s", wanted / floor)


def _step_until_all_decode(core: EngineCore, batch: int) -> None:
    """Step until every request has a token, and some steps more, to include slow starts."""
    begun: set[str] = set()
    while len(begun) < batch:
        begun |= {output.request_id for output in core.step().outputs if output.new_token_ids}
    for _ in range(4):
        core.step()


class _HostTimes:
    """Sums up what a core does between and around the device's work: planning, submitting, bookkeeping."""

    def __init__(self, core: EngineCore) -> None:
        self._seconds = 0.0
        self._steps = 0
        self._parts = ((core.scheduler, "schedule"), (core.executor, "submit"), (core.scheduler, "update"))
        for owner, name in self._parts:
            setattr(owner, name, self._timed(getattr(owner, name), counts=name == "update"))

    def _timed(self, function: Callable[..., object], *, counts: bool) -> Callable[..., object]:
        def timed(*arguments: object, **keywords: object) -> object:
            started = time.thread_time()
            try:
                return function(*arguments, **keywords)
            finally:
                self._seconds += time.thread_time() - started
                self._steps += counts

        return timed

    def per_step(self) -> float:
        return self._seconds / max(self._steps, 1)

    def restore(self) -> None:
        for owner, name in self._parts:
            delattr(owner, name)


def _idle_per_step(core: EngineCore, steps: int = 16) -> float:
    """Seconds of a step in which the device runs nothing, from the first kernel of a trace to its last."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            core.step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end) for event in trace.events() if event.device_type.name == "CUDA"
    )
    idle, reached = 0.0, spans[0][1] if spans else 0.0
    for start, end in spans:
        idle += max(0.0, start - reached)
        reached = max(reached, end)
    return idle / 1e6 / steps
