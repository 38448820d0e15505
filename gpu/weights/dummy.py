"""Random weights from a configuration alone, for benchmarks: the speed of a model without its download."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from gpu.checkpoint import ModelConfig
from gpu.checkpoint.tensors import tensor_shapes

_STANDARD_DEVIATION = 0.02  # what the supported architectures initialize with


def dummy_weights(config: ModelConfig, device: str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the model in `config.torch_dtype`: norm weights are 1, all else is N(0, 0.02).

    Each tensor has its own generator, seeded by its name, so that its values depend neither on the order in which
    tensors are drawn nor on which ranks draw them. They are drawn on `device`, where a large model's take a second
    instead of minutes; another kind of device draws other values.
    """
    dtype = getattr(torch, config.torch_dtype)
    for name, shape in tensor_shapes(config).items():
        if name.endswith("norm.weight"):
            yield name, torch.ones(shape, dtype=dtype, device=device)
            continue
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)
        generator = torch.Generator(device).manual_seed(seed)
        yield (
            name,
            torch.empty(shape, dtype=dtype, device=device).normal_(0.0, _STANDARD_DEVIATION, generator=generator),
        )
