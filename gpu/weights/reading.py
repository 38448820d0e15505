"""The weights of a model, one at a time: from GGUF, from safetensors, or random. Imported where weights are drawn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from gpu.checkpoint import ModelError, ModelFiles, QuantizedRows
from gpu.checkpoint.gguf_file import GGUFFile
from gpu.checkpoint.gguf_model import read_tensors
from gpu.checkpoint.tensors import checked, tensor_shapes
from gpu.weights.dummy import dummy_weights
from gpu.weights.staging import to_device

Weight = torch.Tensor | QuantizedRows


def weights_of(files: ModelFiles, device: str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight exactly once, in file order, under its Hugging Face name and in its row order.

    Tensors are on `device` and in the dtype of the file, float32 where the file is quantized. `lm_head.weight` is left
    out where the embedding is tied. On the CPU they may share memory with the mapped file: copy them, do not write to
    them. On another device they come one at a time (`gpu.weights.staging`), so no more than the largest of them is
    there beside what the caller keeps. Raises `ModelError` for a tensor that is missing, unknown, misshapen or of an
    unsupported type.
    """
    plain = dequantized(packed_weights_of(files, device))
    return plain if device == "cpu" else to_device(plain, torch.device(device))


def packed_weights_of(files: ModelFiles, device: str = "cpu") -> Iterator[tuple[str, Weight]]:
    """As `weights_of`, but what is read stays on the CPU, and what is quantized comes as the file has it."""
    total = len(tensor_shapes(files.config))
    for done, weight in enumerate(checked(_read(files, device), files.config, source=files.name), start=1):
        yield weight
        files.progress("Loading weights", done, total)


def dequantized(weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same weights, each a tensor: float32 where it was quantized."""
    for name, weight in weights:
        yield name, torch.from_numpy(weight.dequantize()) if isinstance(weight, QuantizedRows) else weight


def _read(files: ModelFiles, device: str) -> Iterator[tuple[str, Weight]]:
    """What is made, and not read, is made on `device`."""
    if files.tensors is None:
        yield from dummy_weights(files.config, device)
    elif isinstance(files.tensors, GGUFFile):
        for name, values in read_tensors(files.tensors, files.config):
            yield name, values if isinstance(values, QuantizedRows) else torch.from_numpy(values)
    else:
        for path in files.tensors:
            yield from _read_safetensors(path)


def _read_safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the mapped file, which stays mapped as long as they live, in the order in which they lie, so that a disk
    reads on."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise ModelError(f"{path} cannot be read: {error}. The download may be incomplete; fetch it anew.") from error
