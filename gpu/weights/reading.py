"""The weights of a model, one at a time, in numpy: from GGUF, from safetensors, or random. `gpu.weights.tensors` makes
torch's of them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpu.checkpoint import ModelError, ModelFiles, QuantizedRows
from gpu.checkpoint.architecture import DecoderSpec, parts_of
from gpu.checkpoint.families import spec_of
from gpu.checkpoint.gguf_file import GGUFFile
from gpu.checkpoint.gguf_model import read_tensors
from gpu.checkpoint.safetensors_header import read_header
from gpu.checkpoint.slices import ranges_of
from gpu.checkpoint.stacks import MXFP4Rows, unstacked
from gpu.checkpoint.tensors import checked, shapes_of, text_name
from gpu.parallel.cuts import cut
from gpu.weights.dummy import dummy_weights

# uint16 are the bits of bfloat16, which numpy does not know; other arrays are of a float type.
Weight = NDArray[Any] | QuantizedRows

W = TypeVar("W", bound=Weight)

MAPPED_AT_ONCE = 2**25  # bytes of a file that may be in this process's memory, besides the largest tensors

# Of safetensors; bytes are of MXFP4 (`gpu.checkpoint.stacks`).
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U8": np.uint8}


def read_weights(files: ModelFiles, spec: DecoderSpec | None = None) -> Iterator[tuple[str, Weight]]:
    """Yield every weight exactly once, in file order, under its Hugging Face name and in its row order. Of a rank's
    `spec` (`gpu.parallel.cuts`) only its parts, and nothing else is read.

    They are as the file has them, quantized or in its type. `lm_head.weight` is left out where the embedding is tied.
    They may share memory with the mapped file: copy them, do not write to them. Raises `ModelError` for a tensor that
    is missing, unknown, misshapen or of an unsupported type.
    """
    spec = spec or spec_of(files.config)
    total = len(shapes_of(spec))
    for done, weight in enumerate(checked(_read(files, spec), files.config, source=files.name, spec=spec), start=1):
        yield weight
        files.progress("Loading weights", done, total)


def floats(weight: Weight) -> NDArray[np.float32]:
    """The numbers, in memory that may be the weight's."""
    if isinstance(weight, QuantizedRows):
        return weight.dequantize()
    if weight.dtype == np.uint16:
        return (weight.astype(np.uint32) << 16).view(np.float32)
    return weight.astype(np.float32, copy=False)


def _read(files: ModelFiles, spec: DecoderSpec) -> Iterator[tuple[str, Weight]]:
    ranges = ranges_of(spec)
    if files.tensors is None:
        yield from cut(dummy_weights(files.config, ranges, files.seed), spec)
    elif isinstance(files.tensors, GGUFFile):
        yield from _released(files.tensors.release_pages, read_tensors(files.tensors, files.config, ranges))
    else:
        offsets = {part.weight_name: part.offset for part in parts_of(spec) if part.offset}
        named = ((text_name(name), tensor) for name, tensor in _read_safetensors(files.tensors))
        found = unstacked(named, files.config)
        wanted = ((name, _numbers(name, weight)) for name, weight in found if name in ranges)
        for name, weight in cut(wanted, spec):
            offset = offsets.get(name)
            yield name, weight if offset is None else floats(weight) + np.float32(offset)


def _numbers(name: str, weight: MXFP4Rows | NDArray[Any]) -> Weight:
    """Return the numbers of a weight. Raises ModelError for bytes, which mean nothing without their scales."""
    if isinstance(weight, MXFP4Rows):
        return weight.read()
    if weight.dtype == np.uint8:
        raise ModelError(
            f"The tensor {name} has the dtype U8, which is supported only for MXFP4 experts (NAME_blocks and "
            "NAME_scales): this quantization is not supported. Serve a checkpoint in BF16, F16 or F32."
        )
    return weight


def _released(release: Callable[[], None], weights: Iterable[tuple[str, W]]) -> Iterator[tuple[str, W]]:
    """What is read of a mapped file, whose pages are let go now and then, and all of them at the end: else a model
    would be in memory twice."""
    num_bytes = 0
    for name, weight in weights:
        yield name, weight
        num_bytes += weight.nbytes
        if num_bytes >= MAPPED_AT_ONCE:
            release()
            num_bytes = 0
    release()


def _read_safetensors(paths: Iterable[Path]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Views of the mapped files, which stay mapped as long as they live, in the order in which they lie, so that a disk
    reads on."""
    for path in paths:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # writable, as torch wants it
        yield from _released(partial(mapped.madvise, mmap.MADV_DONTNEED), _tensors_in(path, mapped))


def _tensors_in(path: Path, mapped: mmap.mmap) -> Iterator[tuple[str, NDArray[Any]]]:
    for name, tensor in sorted(read_header(path).items(), key=lambda item: item[1].offset):
        values = np.frombuffer(mapped, _DTYPES[tensor.dtype], math.prod(tensor.shape), tensor.offset)
        yield name, values.reshape(tensor.shape)
