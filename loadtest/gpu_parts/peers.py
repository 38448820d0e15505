"""The same workload with transformers on the same card: generate with a static cache, and continuous batching.

A note names what is left out because it is not installed or refuses the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from gpu.checkpoint import ModelConfig
from loadtest.gpu_parts.engine_runs import Sizes, nano_lengths
from loadtest.gpu_parts.models import PUBLISHED, TINY
from loadtest.gpu_parts.report import Report

MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


def transformers_beside(
    report: Report, name: str, config: ModelConfig, device: torch.device, sizes: Sizes, time_is_left: Callable[[], bool]
) -> None:
    """Decode at batch 1 with a static cache, then as much of the nano-vllm workload as continuous batching can."""
    try:
        import transformers
    except ImportError:
        report.note("transformers is not installed here, so nothing was run beside it")
        return
    if not time_is_left():
        report.note(f"{name} beside transformers was left out, for time")
        return
    values = TINY if name == "tiny" else PUBLISHED[name]
    try:
        oracle = transformers.AutoConfig.for_model(MODEL_TYPES[config.architecture], **values)
        dtype = getattr(torch, config.torch_dtype) if device.type == "cuda" else torch.float32
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(oracle, dtype=dtype).eval()
    except Exception as problem:
        report.note(f"transformers cannot build {name}: {_short(problem)}")
        return
    for part in (_static_cache, _continuous_batching):
        if not time_is_left():
            report.note(f"{name} beside transformers: {part.__name__.strip('_')} was left out, for time")
            continue
        try:
            part(report, name, model, config, device, sizes)
        except Exception as problem:
            report.note(f"{name} beside transformers: {part.__name__.strip('_')} failed: {_short(problem)}")


def _static_cache(
    report: Report, name: str, model: torch.nn.Module, config: ModelConfig, device: torch.device, sizes: Sizes
) -> None:
    prompt = torch.randint(0, config.vocab_size, (1, sizes.context - sizes.decode_steps // 2), device=device)

    run: Any = model.generate  # from a mixin

    def generate(num_tokens: int) -> float:
        started = time.perf_counter()
        run(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            cache_implementation="static",
            disable_compile=True,  # compiling takes minutes; what it gains is said in published figures
            pad_token_id=0,
        )
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    generate(4)
    short, long = generate(4), generate(4 + sizes.decode_steps)
    milliseconds = (long - short) / sizes.decode_steps * 1e3
    ours = report.value(name, f"decode step, 1 x {sizes.context}")
    report.add("transformers", f"{name}: decode step, 1 x {sizes.context}, static cache", milliseconds, "ms", ours)


def _continuous_batching(
    report: Report, name: str, model: torch.nn.Module, config: ModelConfig, device: torch.device, sizes: Sizes
) -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    # An eighth of the requests: its rate settles sooner than the whole workload ends.
    requests = nano_lengths(sizes)[: max(2, sizes.nano_requests // 8)]
    max_tokens = sum(output for _, output in requests) // len(requests)  # one length for all is what it takes
    generation = GenerationConfig(max_new_tokens=max_tokens, eos_token_id=-1, pad_token_id=0, do_sample=False)
    # On a card it sizes its cache by the memory that is free; a CPU it would ask for far more than a trial needs.
    batching = None if device.type == "cuda" else ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64)
    inputs = [[token % config.vocab_size for token in prompt] for prompt, _ in requests]
    generate: Any = model.generate_batch  # from a mixin
    started = time.perf_counter()
    outputs = generate(
        inputs=inputs, generation_config=generation, continuous_batching_config=batching, progress_bar=False
    )
    seconds = time.perf_counter() - started
    num_tokens = sum(len(output.generated_tokens) for output in outputs.values())
    if not num_tokens:
        raise RuntimeError("it gave no tokens")
    ours = report.value(name, "nano-vllm workload, offline")
    report.add(
        "transformers", f"{name}: continuous batching, {len(inputs)} requests", num_tokens / seconds, "tok/s", ours
    )


def _short(problem: Exception) -> str:
    return f"{type(problem).__name__}: {str(problem)[:200]}"
