"""The steps that are run before serving, and the memory they take.

They take the most memory of all steps, so the rest can go to the KV cache; and they launch every variant of every
kernel, so that none is compiled while requests wait. They run twice: first only to compile these kernels in parallel,
then to measure.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from triton.runtime._async_compile import AsyncCompileMode, FutureKernel, active_mode
from triton.runtime.jit import JITCallable, JITFunction

from engine.errors import HeadraceError
from engine.messages import SamplingParams
from engine.plan import NewRequestData, SchedulerOutput, TokenMasks
from gpu.checkpoint.model_files import Progress, no_progress
from gpu.device.graphs import EagerGraphs, Graphs
from gpu.device.runner import DeviceRunner, make_device_runner
from gpu.kv_cache import check_max_model_len, kv_layout
from gpu.models.torch_model import TorchModel
from gpu.runner.host_runner import ModelRunner
from gpu.runner.rows import BatchSizes
from gpu.runner.runner import Runner, StageLinks, WorkerOptions

COMPILING = "Compiling kernels"  # with a warm cache it is quick
MEASURING_STEPS, MEASURING_GRAPHS = "Measuring the memory of steps", "Measuring the memory of CUDA graphs"
MOST_COMPILERS = 8  # threads; much of a compilation holds Python's lock
PLAIN = SamplingParams(temperature=1.0, top_p=0.999, seed=0)
# A request with every sampling feature. Its logits become float32, which needs other kernels than plain requests.
EVERYTHING = SamplingParams(
    temperature=1.0, top_p=0.999, seed=0, logit_bias={0: 1.0}, presence_penalty=1.0, logprobs=20, max_tokens=1
)


class _EveryToken:
    """The masks of a step in which the first request has a grammar that allows everything."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)

    def result(self) -> TokenMasks:
        bits = np.full((1, self._num_words), 2**32 - 1, dtype=np.uint32)
        return TokenMasks(indices=np.zeros(1, dtype=np.int64), bits=bits)


def rehearse(
    runner: Runner, sizes: BatchSizes, max_num_batched_tokens: int, vocab_size: int, progress: Progress = no_progress
) -> None:
    """Run the largest steps of each kind, and report each to `progress`.

    They are: a plain decode; chunks of a prompt of 2, 32 and 300 tokens, for which products with quantized weights have
    other kernels, and the longest; then the whole token budget, divided among the maximum number of requests, all with
    every sampling feature.
    """
    left, lengths = max_num_batched_tokens, []
    for others in reversed(range(min(sizes.max_num_seqs, max_num_batched_tokens))):
        lengths.append(max(1, min(left - others, sizes.max_model_len)))
        left -= lengths[-1]
    longest = min(max_num_batched_tokens, sizes.max_model_len)
    chunks: list[int] = []
    for wanted in (2, 32, 300, longest):
        chunks.append(min(wanted, longest - sum(chunks)))
    names = [f"r{number}" for number in range(len(lengths))]
    everyone = [_request(*pair, sizes, EVERYTHING) for pair in zip(names, lengths, strict=True)]
    plan = SchedulerOutput.made_up
    plans = [plan([], [_request("plain", 1, sizes, PLAIN)], ["plain"], [1], [1])]
    plans.append(plan(["plain"], [_request("long", longest, sizes, PLAIN)], ["long"], chunks[:1], [0]))
    plans += [plan([], [], ["long"], [chunk], [0]) for chunk in chunks[1:] if chunk]
    plans.append(plan(["long"], everyone, names, lengths, [1] * len(names)))
    plans[-1].masks = _EveryToken(vocab_size)
    plans.append(plan(names, [], [], [], []))
    for number, each in enumerate(plans):
        progress(MEASURING_STEPS, number, len(plans))
        runner.submit(each).result()
    progress(MEASURING_STEPS, len(plans), len(plans))


def graph_memory(runner: DeviceRunner, free: Callable[[], int], progress: Progress = no_progress) -> int:
    """Estimate the bytes that all graphs of a runner will take by capturing two: the first, the largest, allocates the
    memory that all share; the second shows what each further graph adds. `free` returns the free bytes."""
    left = [free()]
    for number in range(2):
        progress(MEASURING_GRAPHS, number, 2)
        runner.prepare()
        left.append(free())
    return max(0, left[0] - left[1]) + max(0, left[1] - left[2]) * (runner.num_missing_graphs + 1)


def _request(name: str, length: int, sizes: BatchSizes, sampling: SamplingParams) -> NewRequestData:
    return NewRequestData(
        request_id=name,
        token_ids=[0] * length,
        num_prompt_tokens=length,
        num_computed_tokens=0,
        block_ids=[0] * -(-length // sizes.block_size) * sizes.num_groups,
        sampling=sampling,
        stop_token_ids=[],
    )


# ------------------------------------------------------------------------------------------------------------ compiling
# Kernels are compiled by threads: Triton's compiler releases Python's lock for most of its work.


_launch, _parse, _parsing = JITFunction.run, JITCallable.parse, threading.Lock()


class _CompileOnly(AsyncCompileMode):
    """A context in which this thread's launches only submit their kernels to a pool of compiling threads. A real launch
    would wait for its kernel, so kernels would be compiled one at a time."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        super().__init__(pool, ignore_errors=True)
        self.names: dict[Future[Any], str] = {}  # the submitted kernels' names


def launch_or_compile(kernel: JITFunction, *args: Any, warmup: bool, **keywords: Any) -> Any:
    """Do what `JITFunction.run` does, but launch nothing within `_CompileOnly`."""
    mode = active_mode.get()
    if not isinstance(mode, _CompileOnly):
        return _launch(kernel, *args, warmup=warmup, **keywords)
    compiled = _launch(kernel, *args, warmup=True, **keywords)
    if isinstance(compiled, FutureKernel):
        mode.names[compiled.future] = kernel.fn.__name__
    return compiled


def _parse_alone(function: JITCallable) -> Any:
    """Parse under a lock: Python counts the depth of all syntax trees in one variable, and raises SystemError if
    threads interleave (cpython#106905)."""
    with _parsing:
        return _parse(function)


JITFunction.run, JITCallable.parse = launch_or_compile, _parse_alone


def compile_kernels(launch: Callable[[], object], num_workers: int, progress: Progress = no_progress) -> None:
    """Compile all kernels that `launch` launches, in `num_workers` threads. None of them runs, so what `launch`
    computes means nothing.

    Raises HeadraceError for a kernel that cannot be compiled. Then, and if `progress` raises, compilations that have
    not begun are cancelled; those that run cannot be interrupted and are not waited for.
    """
    pool = ThreadPoolExecutor(min(num_workers, MOST_COMPILERS), thread_name_prefix="headrace-compile")
    with _CompileOnly(pool) as mode:
        try:
            progress(COMPILING, 0, None)
            launch()
            for done, future in enumerate(as_completed(mode.names), 1):
                if (error := future.exception()) is not None:
                    reason = f"Triton cannot compile the kernel {mode.names[future]}: {type(error).__name__}"
                    raise HeadraceError(f"{reason}. device=cpu works without it") from error
                progress(COMPILING, done, len(mode.names))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for future in mode.raw_futures:
                if future.cancelled():
                    future.set_running_or_notify_cancel()  # else leaving the mode would wait for it
            mode.raw_futures = [future for future in mode.raw_futures if future.done()]


def compile_stage(
    model: TorchModel, options: WorkerOptions, links: StageLinks, num_workers: int, progress: Progress = no_progress
) -> None:
    """Compile the kernels of a stage of a pipeline, without the other stages."""
    config, sizes = model.model.config, _sizes(model, options)
    alone = StageLinks(
        receive=links.receive and (lambda num_tokens: np.zeros((num_tokens, config.hidden_size), np.float32)),
        send=links.send and (lambda states: None),
    )
    model.allocate_kv_cache(1)
    runner, most = ModelRunner(model, sizes, alone, model.shards), options.max_num_batched_tokens
    compile_kernels(lambda: rehearse(runner, sizes, most, config.vocab_size), num_workers, progress)


def _sizes(model: TorchModel, options: WorkerOptions) -> BatchSizes:
    config = model.model.config
    longest = check_max_model_len(config, options.max_model_len)
    return BatchSizes(options.max_num_seqs, longest, options.block_size, kv_layout(config).num_groups)


# --------------------------------------------------------------------------------------------------------------- memory
# Memory of a CUDA device: how much of it the KV cache may have. Used by the worker.


def kv_cache_budget(
    model: TorchModel, options: WorkerOptions, num_workers: int, progress: Progress = no_progress
) -> int:
    """Return the bytes that the KV cache may take, after the weights are loaded. `num_workers` threads compile the
    kernels, then a runner with a cache of one block measures what steps, tables and graphs take."""
    sizes, most = _sizes(model, options), options.max_num_batched_tokens

    def rehearsed(graphs: Graphs | None = None, progress: Progress = no_progress) -> DeviceRunner:
        runner = make_device_runner(model, 1, sizes, most, graphs)
        rehearse(runner, sizes, most, model.model.config.vocab_size, progress)
        return runner

    compile_kernels(lambda: graph_memory(rehearsed(EagerGraphs()), lambda: 0), num_workers, progress)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    resident = torch.cuda.memory_allocated(model.device)
    runner = rehearsed(progress=progress)
    steps = torch.cuda.max_memory_allocated(model.device) - resident
    graphs = graph_memory(runner, lambda: torch.cuda.mem_get_info(model.device)[0], progress)
    torch.cuda.synchronize(model.device)
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    return int(options.gpu_memory_utilization * total) - (total - free) - steps - graphs


def synchronize(device: str) -> None:
    """Wait for all work that was started. Errors of a broken device are ignored."""
    with suppress(RuntimeError):
        torch.cuda.synchronize(torch.device(device))


def release() -> None:
    """Free the memory that torch caches."""
    torch.cuda.empty_cache()


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device)
