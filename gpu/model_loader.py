"""Choose the device and what computes there, and load a model onto it.

The worker calls `load_model`. On a CPU the C++ library computes if it was built, and torch is not imported.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Protocol

from engine.errors import ConfigError
from gpu.checkpoint import ModelConfig
from gpu.checkpoint.architecture import DecoderSpec
from gpu.checkpoint.families.table import spec_of
from gpu.cpu.decoder import CPUCausalLM
from gpu.cpu.encoder import CPUEncoder
from gpu.cpu.library import Library, load_library
from gpu.cuda_host import check_compiler, ensure_kernel_cache, why_no_device
from gpu.host import available_memory, has_torch, usable_cores
from gpu.kv_cache import check_max_model_len, check_weights_fit
from gpu.runner.encoder_runner import Encoder
from gpu.runner.runner import LanguageModel, WorkerOptions
from gpu.sampling.draw import Shards
from gpu.sharding import Layout, sharded

logger = logging.getLogger(__name__)

_warn_once = cache(logger.warning)
LIBRARY_DTYPES = ("auto", "bfloat16")


class ServedModel(LanguageModel, Protocol):
    """A model with its weights in place and its KV cache."""

    @property
    def kv_caches(self) -> Sequence[Any]:
        """The cache of every layer, once it is allocated: an array or a tensor, [num_blocks, ...]."""

    @property
    def tokens_of_experts(self) -> Sequence[Any]:
        """The tokens that each expert has had so far: an array for each layer with experts."""

    @property
    def element_size(self) -> float:
        """Bytes of a number in the KV cache, with its part of a scale."""

    @property
    def tokens_held(self) -> int:
        """The tokens that a block of the cache takes memory for: its size, or more if it is padded."""

    @property
    def forms(self) -> str:
        """The form of the weights and what computes with them, for the log."""

    @property
    def shards(self) -> Shards | None:
        """The sampling over ranks if this rank has the logits of some tokens; None if it has all."""

    def set_max_model_len(self, max_model_len: int) -> None:
        """Set the longest context, in tokens. Called when the KV cache's size is known, before the first step."""

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocate the cache of every layer, zeroed."""

    def allocate_states(self, num_slots: int) -> None:
        """Allocate zeroed states, in a model that has them, and append them to the caches."""


def rank_spec(config: ModelConfig, options: WorkerOptions, device: str, layout: Layout) -> DecoderSpec:
    """Return a rank's shard of a model, made for the library that computes it. Raises ConfigError if the model cannot
    be sharded over so many ranks."""
    return sharded(spec_of(config), layout, gathers=library_for(config, options, device) is not None)


def load_model(
    config: ModelConfig,
    weights: Iterable[tuple[str, Any]],
    options: WorkerOptions,
    device: str,
    spec: DecoderSpec | None = None,
    communicator: Any = None,
) -> ServedModel:
    """Build the model and draw its weights; call it in the thread that will run the steps. Raises ConfigError for
    options that cannot work, ModelError for weights that the device cannot hold.

    The weights come from `gpu.weights.reading.read_weights`; where torch computes they may be tensors. `spec` is the
    part of the model that a rank holds (`rank_spec`), None for all of it. The tensor ranks of a stage have a
    `communicator`: the C++ library needs a `gpu.cpu.communicator.SharedMemoryCommunicator`, which torch takes too;
    torch on other devices needs a `gpu.sharding.Communicator`.

    Until `set_max_model_len` is called, the model takes as many positions as one step has tokens: memory may not
    suffice for all that a checkpoint allows.

    On a CPU the library's decoder is built, unless dtype is float32 or float16. There, dtype "auto" keeps a file's
    quantized weights as they are, "bfloat16" does not. For torch see `gpu.models.torch_model.resolve_dtype`.
    """
    longest = min(check_max_model_len(config, options.max_model_len), options.max_num_batched_tokens)
    spec = spec or spec_of(config)
    num_threads = options.num_threads or usable_cores()
    library = library_for(config, options, device)
    has_few_bits = library is not None or spec.keeps_packed
    check_weights_fit(spec, free_memory(device), 4 if has_few_bits else _torch_bits(config, options, device))
    check_quantization(options, library, device)
    check_ranks(spec, device, communicator is not None)
    check_kv_cache_dtype(options, library, device, spec.has_kernels)
    if library is not None:
        return CPUCausalLM(
            library,
            config,
            weights,
            block_size=options.block_size,
            max_model_len=longest,
            num_threads=num_threads,
            quantized=options.dtype == "auto",
            spec=spec,
            communicator=communicator,
            max_num_batched_tokens=options.max_num_batched_tokens,
            kv_cache_dtype=options.kv_cache_dtype,
        )
    if config.transformers_dir is not None:
        from gpu.models.transformers_model import load_transformers_model

        return load_transformers_model(
            config, dtype=options.dtype, device=device, block_size=options.block_size, num_threads=num_threads
        )
    from gpu.models.torch_model import load_torch_model

    return load_torch_model(
        config,
        weights,
        dtype=options.dtype,
        device=device,
        block_size=options.block_size,
        max_model_len=longest,
        num_threads=num_threads,
        spec=spec,
        communicator=communicator,
        kv_cache_dtype=options.kv_cache_dtype,
    )


def load_encoder(
    config: ModelConfig, weights: Iterable[tuple[str, Any]], options: WorkerOptions, device: str
) -> Encoder:
    """Build an encoder and draw its weights, as `load_model` does; `weights` are without those of its heads.

    dtype "auto" is float32 on a CPU where torch computes, so that vectors equal those of the authors' programs.
    """
    longest, library = check_max_model_len(config, options.max_model_len), library_for(config, options, device)
    check_quantization(options, library, device)
    check_kv_cache_dtype(options, None, device, False)
    if library is not None:
        check_weights_fit(spec_of(config), free_memory(device))
        return CPUEncoder(
            library,
            config,
            weights,
            num_threads=options.num_threads or usable_cores(),
            quantized=options.dtype == "auto",
            max_model_len=longest,
            max_num_batched_tokens=options.max_num_batched_tokens,
        )
    from gpu.models.encoder import TorchEncoder
    from gpu.models.torch_model import resolve_dtype, use_threads

    use_threads(options.num_threads or usable_cores())
    name = "float32" if device == "cpu" and options.dtype == "auto" else options.dtype
    dtype = resolve_dtype(name, config, device)
    check_weights_fit(spec_of(config), free_memory(device), 8 * dtype.itemsize)
    return TorchEncoder(config, weights, dtype=dtype, device=device, max_model_len=longest)


def _torch_bits(config: ModelConfig, options: WorkerOptions, device: str) -> int:
    """Return the bits per weight of the torch backend, which keeps all weights in one dtype."""
    from gpu.models.torch_model import resolve_dtype

    return 8 * resolve_dtype(options.dtype, config, device).itemsize


def library_for(config: ModelConfig, options: WorkerOptions, device: str) -> Library | None:
    """Return the C++ library if it supports this model with these options; None if torch computes."""
    if device != "cpu" or options.dtype not in LIBRARY_DTYPES or options.runner == "device":
        return None
    kind = CPUCausalLM if config.encoder is None else CPUEncoder
    return load_library() if kind.supports(config) else None


def check_ranks(spec: DecoderSpec, device: str, has_tensor_ranks: bool) -> None:
    """Raise ConfigError if the model is divided among ranks on a device without kernels for it."""
    is_stage = spec.embedding is None or spec.norm is None
    if device != "cpu" and not spec.has_kernels and (has_tensor_ranks or is_stage):
        allowed = "models with latent attention or states, and Gemma 3n and 4, have one rank on CUDA"
        raise ConfigError("device", device, allowed=allowed, hint="device=cpu works, and there several ranks")


def check_quantization(options: WorkerOptions, library: Library | None, device: str) -> None:
    """Raise ConfigError if the weights cannot have the form that the options ask for."""
    if options.quantization == "none" or (library is not None and options.dtype == "auto"):
        return
    raise ConfigError(
        "quantization",
        options.quantization,
        allowed="it needs dtype=auto on a CPU, where the C++ library computes with quantized weights; "
        f"here dtype is {options.dtype}, and {'torch' if library is None else 'the library'} computes on {device}",
        hint="quantization=none works",
    )


def check_kv_cache_dtype(options: WorkerOptions, library: Library | None, device: str, has_kernels: bool) -> None:
    """Raise ConfigError if what computes cannot keep keys and values in the type that the options ask for."""
    if options.kv_cache_dtype == "auto" or (options.kv_cache_dtype == "int8" and library is not None):
        return
    found = f"here {'torch' if library is None else 'the library'} computes on {device}"
    if device != "cpu" and has_kernels:
        import torch

        from gpu.kernels import prefill

        capability = prefill.capability_of(torch.device(device))
        if options.kv_cache_dtype == "fp8" and capability >= (8, 9):
            return
        found = f"here {device} of compute capability {capability[0]}.{capability[1]} computes"
    raise ConfigError(
        "kv_cache_dtype",
        options.kv_cache_dtype,
        allowed="fp8 needs kernels of a CUDA device of compute capability 8.9 (Ada, Hopper) or later, and int8 a CPU "
        f"with the C++ library; {found}",
        hint="kv_cache_dtype=auto works",
    )


def import_what_computes(config: ModelConfig, options: WorkerOptions) -> None:
    """Import the modules that `load_model` needs, at a time that the caller chooses. Raises ConfigError for a missing
    device, and if torch is needed and not installed."""
    device = resolve_device(options.device)
    if library_for(config, options, device) is None and not has_torch():
        raise _why_torch(config, options)
    if device != "cpu":
        check_compiler()
        ensure_kernel_cache()


def free_memory(device: str) -> int:
    if device == "cpu":
        return available_memory()
    import torch

    return torch.cuda.mem_get_info(torch.device(device))[0]


def resolve_device(name: str) -> str:
    """Return the device of a setting, as torch names it: "cpu" or "cuda:0". Raises ConfigError for one that this
    machine or this torch does not have, and for a driver that is too old."""
    if name == "cpu" or (name == "auto" and not (_has_cuda_driver() and has_torch())):
        return "cpu"
    if not has_torch():
        raise _needs_torch("device", name, "it", "device=cpu works")
    import torch

    count = torch.cuda.device_count()  # the driver's devices, whether or not this torch can use them
    if name == "auto":
        if torch.cuda.is_available():
            return "cuda:0"
        if count:
            _warn_once("A CUDA device is present, but the CPU is used: %s. %s.", *_why_no_device())
        return "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is not None and device.type == "cpu":
        return name
    if device is not None and device.type == "cuda" and (device.index or 0) < count:
        if not torch.cuda.is_available():
            reason, advice = _why_no_device()
            raise ConfigError("device", name, allowed=reason, hint=f"{advice}. device=cpu works")
        return f"cuda:{device.index or 0}"  # with its number: plain "cuda" means the thread's current device to torch
    found = f"{count} CUDA device{'s were' if count != 1 else ' was'} found"
    raise ConfigError("device", name, allowed=f"allowed are auto, cpu and cuda, and {found}", hint="device=cpu works")


def use_device(name: str) -> str:
    """Resolve the device of a setting and make it the calling thread's current one, which is where Triton launches
    kernels and where torch records events and captures graphs. Raises ConfigError as `resolve_device`."""
    device = resolve_device(name)
    if device != "cpu":
        import torch

        torch.cuda.set_device(torch.device(device))
    return device


def _why_no_device() -> tuple[str, str]:
    import torch

    return why_no_device(torch.__version__, torch.version.cuda)


def _why_torch(config: ModelConfig, options: WorkerOptions) -> ConfigError:
    """Return the error that names what needs torch, which is not installed."""
    if options.dtype not in LIBRARY_DTYPES:
        return _needs_torch("dtype", options.dtype, "on a CPU it", "dtype=auto works")
    if load_library() is None:
        what = "no build of the C++ library runs on this processor, so every model"
        return _needs_torch("device", "cpu", what, "x86 with AVX2 and 64-bit ARM work")
    return _needs_torch("model", config.architecture, "a model of this kind or shape", "smollm2-135m-instruct works")


def _needs_torch(setting: str, value: str, what: str, hint: str) -> ConfigError:
    allowed = f"{what} needs torch, which is not installed (pip install '.[torch]' in a clone of Headrace)"
    return ConfigError(setting, value, allowed=allowed, hint=f"Without it {hint}")


def _has_cuda_driver() -> bool:
    """Return True if there is a driver. Without one, asking torch for devices would waste a second."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
