"""The steps that are run before serving, and the memory they take.

They take the most memory, so that what is left can be given to the KV cache; and they start every kernel in every form
in which a step may want it, so that none is compiled while streams wait.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch

from engine.messages import SamplingParams
from engine.plan import NewRequestData, SchedulerOutput, TokenMasks
from gpu.checkpoint.model_files import Progress, no_progress
from gpu.device.runner import DeviceRunner, make_device_runner
from gpu.kv_cache import check_max_model_len, kv_layout
from gpu.models.torch_model import TorchModel
from gpu.runner.rows import BatchSizes
from gpu.runner.runner import Runner, WorkerOptions

PHASE = "Compiling kernels"  # the first step of each form compiles its kernels; with a warm cache it is quick
PLAIN = SamplingParams(temperature=1.0, top_p=0.999, seed=0)
# All that a request may want of the logits. They become float32 for it, so these are other kernels than the plain ones.
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
    """Run the steps that no later step exceeds, and report each to `progress`.

    They are: a plain draw; a short chunk of a prompt; the longest chunk there is; then the whole token budget for as
    many requests as run at once, all of which want everything.
    """
    left, lengths = max_num_batched_tokens, []
    for others in reversed(range(min(sizes.max_num_seqs, max_num_batched_tokens))):
        lengths.append(max(1, min(left - others, sizes.max_model_len)))
        left -= lengths[-1]
    longest = min(max_num_batched_tokens, sizes.max_model_len)
    chunks = [min(2, longest), longest - min(2, longest)]
    names = [f"r{number}" for number in range(len(lengths))]
    everyone = [_request(*pair, sizes, EVERYTHING) for pair in zip(names, lengths, strict=True)]
    plan = SchedulerOutput.made_up
    plans = [plan([], [_request("plain", 1, sizes, PLAIN)], ["plain"], [1], [1])]
    plans.append(plan(["plain"], [_request("long", longest, sizes, PLAIN)], ["long"], chunks[:1], [0]))
    if chunks[1]:
        plans.append(plan([], [], ["long"], chunks[1:], [0]))
    plans.append(plan(["long"], everyone, names, lengths, [1] * len(names)))
    plans[-1].masks = _EveryToken(vocab_size)
    plans.append(plan(names, [], [], [], []))
    for number, each in enumerate(plans):
        progress(PHASE, number, len(plans))
        runner.submit(each).result()
    progress(PHASE, len(plans), len(plans))


def graph_memory(runner: DeviceRunner, free: Callable[[], int]) -> int:
    """Bytes that all graphs of a runner that has none will take, estimated from two: the first, which is the largest,
    brings the memory that all share, the second what each takes besides. `free` says how many bytes are."""
    before = free()
    runner.prepare()
    after_one = free()
    runner.prepare()
    return max(0, before - after_one) + max(0, after_one - free()) * (runner.num_missing_graphs + 1)


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


# --------------------------------------------------------------------------------------------------------------- memory
# Memory of a CUDA device: how much of it the KV cache may have. Used by the worker.


def kv_cache_budget(model: TorchModel, options: WorkerOptions, progress: Progress = no_progress) -> int:
    """Bytes that the KV cache may take, with the weights in place. A runner with a cache of one block finds out what
    steps, tables and graphs take, and compiles what they need."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    resident = torch.cuda.memory_allocated(model.device)
    longest = check_max_model_len(model.model.config, options.max_model_len)
    num_groups = kv_layout(model.model.config).num_groups
    sizes = BatchSizes(options.max_num_seqs, longest, options.block_size, num_groups)
    runner = make_device_runner(model, 1, sizes, options.max_num_batched_tokens)
    rehearse(runner, sizes, options.max_num_batched_tokens, model.model.config.vocab_size, progress)
    steps = torch.cuda.max_memory_allocated(model.device) - resident
    graphs = graph_memory(runner, lambda: torch.cuda.mem_get_info(model.device)[0])
    torch.cuda.synchronize(model.device)
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    return int(options.gpu_memory_utilization * total) - (total - free) - steps - graphs


def synchronize(device: str) -> None:
    """Wait for all that was started. A device that is broken says so here too, and nobody cares any more."""
    with suppress(RuntimeError):
        torch.cuda.synchronize(torch.device(device))


def release() -> None:
    """Give back what torch keeps for later."""
    torch.cuda.empty_cache()


def device_name(device: str) -> str:
    """The model of a CUDA device."""
    return torch.cuda.get_device_name(device)
