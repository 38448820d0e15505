"""The weights of a model as torch tensors, on a device. Imported where torch computes, because it imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from gpu.checkpoint import ModelConfig, ModelFiles, QuantizedRows
from gpu.checkpoint.architecture import DecoderSpec
from gpu.checkpoint.families import spec_of
from gpu.checkpoint.tensors import shapes_of
from gpu.weights.dummy import STANDARD_DEVIATION, dummy_seed
from gpu.weights.reading import Weight, read_weights
from gpu.weights.staging import to_device


def weights_of(
    files: ModelFiles, device: str = "cpu", spec: DecoderSpec | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """As `gpu.weights.read_weights`, on `device` and in the dtype of the file, float32 where the file is quantized.

    On the CPU they may share memory with the mapped file. On another device they come one at a time
    (`gpu.weights.staging`), so no more than the largest of them is there beside what the caller keeps.
    """
    if device == "cpu":
        return as_tensors(read_weights(files, spec))
    if files.tensors is None:
        return drawn_on(files.config, device, spec, files.seed)
    return to_device(as_tensors(read_weights(files, spec)), torch.device(device))


def as_tensors(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same weights, each a tensor: float32 where it was quantized."""
    for name, weight in weights:
        yield name, weight if isinstance(weight, torch.Tensor) else _tensor(weight)


def drawn_on(
    config: ModelConfig, device: str, spec: DecoderSpec | None = None, seed: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """As `gpu.weights.dummy.dummy_weights`, but other values, drawn on the device: for a large model that takes a
    second instead of minutes. Those of a rank are no parts of one rank's."""
    dtype = getattr(torch, config.torch_dtype)
    for name, shape in shapes_of(spec or spec_of(config)).items():
        tensor = torch.ones(shape, dtype=dtype, device=device)
        if not name.endswith("norm.weight"):
            generator = torch.Generator(device).manual_seed(dummy_seed(name, seed))
            tensor.normal_(0.0, STANDARD_DEVIATION, generator=generator)
        yield name, tensor


def _tensor(weight: Weight) -> torch.Tensor:
    if isinstance(weight, QuantizedRows):
        return torch.from_numpy(weight.dequantize())
    if weight.dtype == np.uint16:
        return torch.from_numpy(weight.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(weight)
