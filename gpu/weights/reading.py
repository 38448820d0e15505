"""Weights in numpy, one at a time: from GGUF, safetensors, or random."""

from __future__ import annotations

import hashlib
import math
import mmap
from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpu.checkpoint import ModelConfig, ModelError, ModelFiles, QuantizedRows
from gpu.checkpoint.architecture import DecoderSpec, parts_of
from gpu.checkpoint.families.table import spec_of
from gpu.checkpoint.gguf_file import GGUFFile
from gpu.checkpoint.gguf_model import read_tensors
from gpu.checkpoint.hf_files import of_module, read_header
from gpu.checkpoint.quantized_layers import QuantizedLayer, linear_layers
from gpu.checkpoint.quantized_rows import PackedRows, from_bfloat16
from gpu.checkpoint.tensors import (
    MXFP4Rows,
    Weight,
    checked,
    ranges_of,
    reordered,
    shapes_of,
    tensor_shapes,
    text_name,
    unstacked,
)
from gpu.sharding import cut

W = TypeVar("W", bound=Weight)

MAPPED_AT_ONCE = 2**25  # bytes of a mapped file that may be in memory, besides the largest tensors

# The types of safetensors; U8 is for MXFP4 (`gpu.checkpoint.tensors`) and NVFP4.
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U8": np.uint8}
_DTYPES |= {"F8_E4M3": np.uint8, "I8": np.int8, "I32": np.int32, "I64": np.int64}  # of quantized layers


def read_weights(files: ModelFiles, spec: DecoderSpec | None = None) -> Iterator[tuple[str, Weight]]:
    """Yield every weight once, in the order of the file, with its Hugging Face name and row order; for a rank's `spec`
    (`gpu.sharding`) only its parts are read.

    Weights are quantized or in the type of the file; where `spec.keeps_packed`, linear layers are `PackedRows`.
    `lm_head.weight` is skipped if the embedding is tied. Weights may share memory with the mapped file: do not write to
    them. Raises `ModelError` for a tensor that is missing, unknown,
    misshapen or of an unsupported type.
    """
    spec = spec or spec_of(files.config)
    total = len(shapes_of(spec))
    for done, weight in enumerate(checked(_read(files, spec), files.config, source=files.name, spec=spec), start=1):
        yield weight
        files.progress("Loading weights", done, total)


def floats(weight: Weight) -> NDArray[np.float32]:
    """Return a weight in float32. The result may share its memory."""
    if isinstance(weight, (QuantizedRows, PackedRows)):
        return weight.dequantize()
    if weight.dtype == np.uint16:
        return from_bfloat16(weight)
    return weight.astype(np.float32, copy=False)


def _read(files: ModelFiles, spec: DecoderSpec) -> Iterator[tuple[str, Weight]]:
    ranges = ranges_of(spec)
    if files.tensors is None:
        yield from cut(dummy_weights(files.config, ranges, files.seed), spec)
    elif isinstance(files.tensors, GGUFFile):
        yield from _released(files.tensors.release_pages, read_tensors(files.tensors, files.config, ranges))
    else:
        parts = {name: part for part in parts_of(spec) for name in (part.weight_name, f"{part.name}.bias")}
        tensors: Iterator[tuple[str, Any]] = _read_safetensors(files.tensors)
        if files.quantized is not None:
            names = frozenset(chain.from_iterable(map(read_header, files.tensors)))
            tensors = linear_layers(tensors, files.quantized, names, files.name)
        found = unstacked(((text_name(name), tensor) for name, tensor in tensors), files.config)
        kept: Container[str] = spec.linear_weights if spec.keeps_packed else ()
        wanted = ((name, _numbers(name, weight, name in kept)) for name, weight in found if name in ranges)
        for name, weight in cut(wanted, spec):
            part, rows = parts[name], reordered(weight, parts[name].order)
            yield name, floats(rows) + np.float32(part.offset) if part.offset else rows


def _numbers(name: str, weight: MXFP4Rows | QuantizedLayer | NDArray[Any], keeps_packed: bool) -> Weight:
    """Return the numbers of a weight. Raises ModelError for bytes and integers, which mean nothing without scales."""
    if keeps_packed and isinstance(weight, QuantizedLayer) and (packed := weight.packed()) is not None:
        return packed
    if isinstance(weight, (MXFP4Rows, QuantizedLayer)):
        return weight.read()
    if weight.dtype.kind in "iu" and weight.dtype != np.uint16:
        dtype = "U8" if weight.dtype == np.uint8 else str(weight.dtype)
        raise ModelError(
            f"The tensor {name} has the dtype {dtype}, but neither quantization_config in config.json nor MXFP4 "
            "(NAME_blocks and NAME_scales) says what it means. Serve a checkpoint in BF16, F16 or F32."
        )
    return weight


def _released(release: Callable[[], None], weights: Iterable[tuple[str, W]]) -> Iterator[tuple[str, W]]:
    """Yield the weights of a mapped file, and release its pages from time to time and at the end; otherwise the model
    would be in memory twice."""
    num_bytes = 0
    for name, weight in weights:
        yield name, weight
        num_bytes += weight.nbytes
        if num_bytes >= MAPPED_AT_ONCE:
            release()
            num_bytes = 0
    release()


def _read_safetensors(paths: tuple[Path, ...]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield views of the mapped files, in the order of the files, so that the disk reads sequentially."""
    for path in paths:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # writable, as torch wants it
        yield from _released(
            partial(mapped.madvise, mmap.MADV_DONTNEED), _tensors_in(path, mapped, of_module(path, paths))
        )


def _tensors_in(path: Path, mapped: mmap.mmap, prefix: str) -> Iterator[tuple[str, NDArray[Any]]]:
    for name, tensor in sorted(read_header(path).items(), key=lambda item: item[1].offset):
        values = np.frombuffer(mapped, _DTYPES[tensor.dtype], math.prod(tensor.shape), tensor.offset)
        yield prefix + name, values.reshape(tensor.shape)


# ---------------------------------------------------------------------------------------------------------------- dummy
# Random weights from a configuration, for benchmarks without a download.


STANDARD_DEVIATION = 0.02  # the supported architectures' initialization


def dummy_weights(
    config: ModelConfig, names: Container[str] | None = None, seed: int = 0
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield every tensor of the model in `config.torch_dtype`, as a `Weight` of `gpu.checkpoint.tensors`: norm weights
    are 1, all else is N(0, 0.02). With `names`, only these.

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
