"""A CUDA device for tests that compiles for Hopper and runs nothing.

Its tensors lie on the CPU, and Triton compiles for compute capability 9.0 what is launched on them. A worker loads and
warms up on it as on a card; what steps compute on it means nothing. `python -m tests.gpu.fake_card` serves on it, with
the arguments of `headrace`. Needs a process of its own, because Triton decides once whether it interprets.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import gpu.model_loader
import gpu.models.torch_model
import gpu.worker
from gpu.attention import TritonAttention
from gpu.device import warm_up
from gpu.kernels import dispatch, prefill
from gpu.kv_cache import GIB


class _Driver:
    """What Triton asks before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def _compile(kernel: JITFunction, *args: Any, warmup: bool, **keywords: Any) -> Any:
    return warm_up.launch_or_compile(kernel, *args, warmup=True, **keywords)


def pretend() -> None:
    """Let this process take its CPU for a card."""
    assert not triton.knobs.runtime.interpret, "Triton would interpret: unset TRITON_INTERPRET"
    triton.runtime.driver.set_active(_Driver())
    JITFunction.run = _compile
    dispatch._interpreting = True  # CPU tensors to the launchers
    prefill.capability_of = lambda device: (9, 0)  # type: ignore[assignment]
    for module, name, other in (
        (gpu.models.torch_model, "TorchAttention", TritonAttention),
        (gpu.worker, "use_device", lambda device: "cpu:0"),  # which torch knows, and which is not "cpu"
        (gpu.worker, "free_memory", lambda device: GIB),
        (gpu.model_loader, "free_memory", lambda device: GIB),
    ):
        setattr(module, name, other)
    answers: dict[str, Callable[..., Any]] = {
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: 0,
        "max_memory_allocated": lambda device: 0,
        "mem_get_info": lambda device: (GIB, GIB),
        "synchronize": lambda device: None,
        "get_device_name": lambda device: "no card",
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)


if __name__ == "__main__":
    from app.commands.cli import main as headrace

    pretend()
    sys.exit(headrace())
