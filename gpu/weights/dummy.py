"""Random weights from a configuration alone, for benchmarks: the speed of a model without its download."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.checkpoint import ModelConfig
from gpu.checkpoint.tensors import tensor_shapes

STANDARD_DEVIATION = 0.02  # what the supported architectures initialize with


def dummy_weights(
    config: ModelConfig, names: Container[str] | None = None, seed: int = 0
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield every tensor of the model in `config.torch_dtype`, as a `gpu.weights.Weight`: norm weights are 1, all else
    is N(0, 0.02). With `names`, only these.

    Each tensor has its own generator, seeded by `seed` and its name, so that its values depend neither on the order in
    which tensors are drawn nor on the ranks that draw them.
    """
    for name, shape in tensor_shapes(config).items():
        if names is not None and name not in names:
            continue
        if name.endswith("norm.weight"):
            numbers = np.ones(shape, dtype=np.float32)
        else:
            generator = np.random.Generator(np.random.SFC64(dummy_seed(name, seed)))
            numbers = generator.standard_normal(shape, dtype=np.float32) * np.float32(STANDARD_DEVIATION)
        if config.torch_dtype == "bfloat16":
            yield name, (numbers.view(np.uint32) >> 16).astype(np.uint16)
        else:
            yield name, numbers.astype(config.torch_dtype, copy=False)


def dummy_seed(name: str, seed: int) -> int:
    """Return the seed of one tensor, below 2^63."""
    return (
        int.from_bytes(hashlib.sha256(f"{seed} {name}".encode() if seed else name.encode()).digest()[:8], "little") >> 1
    )
