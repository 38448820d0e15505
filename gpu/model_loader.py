"""How a model comes to be on its device: which device and types the options mean, and who computes there.

The worker calls `load_model`. On a CPU the library of `gpu.cpu` computes where it was built, elsewhere torch does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch

from engine.errors import ConfigError
from gpu.attention.torch_backend import TorchAttention
from gpu.attention.triton_backend import TritonAttention
from gpu.checkpoint import ModelConfig
from gpu.cpu.decoder import CPUCausalLM
from gpu.cpu.library import load_library
from gpu.host import available_memory, has_bfloat16_instructions
from gpu.kv_cache_size import check_max_model_len, check_weights_fit
from gpu.models import CausalLM
from gpu.runner import LanguageModel
from gpu.weights import Weight, dequantized

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """How a model is run, as the operator chose it."""

    dtype: str = "auto"  # a key of DTYPES, or "auto": see `resolve_dtype`
    device: str = "auto"  # "cpu", "cuda", "cuda:1"; "auto" is CUDA where there is one
    max_model_len: int | None = None  # None: the model's own, or what the KV cache holds if that is less
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_size: int = 16
    kv_cache_memory: int | None = None  # bytes; None: chosen from what is free
    kv_cache_share: float = 1.0  # of that choice on a CPU, where several engines share the memory
    gpu_memory_utilization: float = 0.9  # share of a CUDA device's memory that weights, activations and KV may fill
    # Where the batch is kept (see `gpu.device`): "auto" is on the device if that is a card, and else on the host.
    runner: Literal["auto", "host", "device"] = "auto"


class PagedModel(LanguageModel, Protocol):
    """A model that also knows the layout of its cache, and how long a context is served."""

    def set_max_model_len(self, max_model_len: int) -> None:
        """The longest context, in tokens. Called when the size of the KV cache is known, before the first step."""
        ...

    def allocate_kv_cache(self, num_blocks: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        """The zeroed cache of every layer."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with its weights in place."""

    model: PagedModel
    dtype: torch.dtype  # of the KV cache
    tokens_held: int  # for how many tokens a block of the cache takes memory: its size, or more where it is padded
    weight_forms: str  # for the log


def load_model(
    config: ModelConfig,
    weights: Iterable[tuple[str, Weight]],
    options: WorkerOptions,
    device: torch.device,
) -> LoadedModel:
    """Build the model and draw its weights. Raises ConfigError for options that cannot work,
    ModelError for weights that the device cannot hold.

    It takes as many positions as one step has tokens, until `set_max_model_len` is called: what a checkpoint allows may
    be more than there is memory for.

    On a CPU it is the library's decoder, unless float32 or float16 is asked for: dtype "auto" keeps the bits that a
    file has quantized to, "bfloat16" does not.
    """
    longest = min(check_max_model_len(config, options.max_model_len), options.max_num_batched_tokens)
    check_weights_fit(config, free_memory(device))
    library = load_library() if device.type == "cpu" and options.dtype in ("auto", "bfloat16") else None
    if library is not None and options.runner != "device" and CPUCausalLM.supports(config):
        packed = CPUCausalLM(
            library,
            config,
            weights,
            block_size=options.block_size,
            max_model_len=longest,
            num_threads=torch.get_num_threads(),
            quantized=options.dtype == "auto",
        )
        return LoadedModel(
            model=packed,
            dtype=torch.bfloat16,
            tokens_held=packed.tokens_held,
            weight_forms=f"{packed.forms} weights ({library.instructions})",
        )
    dtype = resolve_dtype(options.dtype, config, device)
    backend = TritonAttention if device.type == "cuda" else TorchAttention
    attention = partial(backend, block_size=options.block_size)
    model = CausalLM(config, dtype=dtype, device=device, max_model_len=longest, attention=attention)
    model.load_weights(dequantized(weights))
    return LoadedModel(
        model=model,
        dtype=dtype,
        tokens_held=options.block_size,
        weight_forms=f"{str(dtype).removeprefix('torch.')} weights (torch)",
    )


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on the device."""
    return available_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def resolve_device(name: str) -> torch.device:
    """The device of a setting. Raises ConfigError for one that this machine or this torch does not have."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    count = torch.cuda.device_count()
    if device is not None and (device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < count)):
        return device
    found = f"{count} CUDA device{'s were' if count != 1 else ' was'} found"
    raise ConfigError("device", name, allowed=f"allowed are auto, cpu and cuda, and {found}", hint="device=cpu works")


def resolve_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The type of weights, activations and KV.

    "auto" is the checkpoint's on CUDA. On a CPU it is bfloat16 if the processor has instructions for it, which halves
    what each token reads, and float32 if not.
    """
    if name == "auto":
        if device.type == "cpu":
            return torch.bfloat16 if has_bfloat16_instructions() else torch.float32
        name = config.torch_dtype
    if name not in DTYPES:
        raise ConfigError("dtype", name, allowed=f"it must be auto, {', '.join(DTYPES)}", hint="dtype=auto works")
    return DTYPES[name]
