"""The part of a tensor that one rank of several has, taken out of the file without the rest being read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.checkpoint.architecture import DecoderSpec, Ranges, parts_of
from gpu.checkpoint.gguf_file import TENSOR_TYPES
from gpu.checkpoint.quantized_rows import QuantizedRows

_TYPES = {tensor_type.name: tensor_type for tensor_type in TENSOR_TYPES}


def ranges_of(spec: DecoderSpec) -> dict[str, Ranges | None]:
    """Which range of each dimension of every tensor `spec` has, by the tensor's Hugging Face name; None: all of it."""
    ranges: dict[str, Ranges | None] = {}
    for part in parts_of(spec):
        ranges[part.weight_name] = part.ranges
        if part.bias:
            ranges[f"{part.name}.bias"] = None if part.ranges is None else part.ranges[:1]
    return ranges


def sliced(weight: NDArray[Any] | QuantizedRows, ranges: Ranges | None) -> NDArray[Any] | QuantizedRows:
    """These ranges of a tensor: a view, if they are whole quantization blocks; else float32 of just so many columns."""
    if ranges is None:
        return weight
    index = tuple(slice(*bounds) for bounds in ranges)
    if not isinstance(weight, QuantizedRows):
        return weight[index]
    shape, rows = tuple(stop - start for start, stop in ranges), weight.data[index[:-1]]
    (start, stop), kind = ranges[-1], _TYPES[weight.type]
    first, last = start // kind.block, -(-stop // kind.block)
    blocks = rows[..., first * kind.block_bytes : last * kind.block_bytes]
    if (last - first) * kind.block == stop - start:
        return QuantizedRows(weight.type, shape, blocks)
    around = QuantizedRows(weight.type, (*shape[:-1], (last - first) * kind.block), blocks).dequantize()
    return np.ascontiguousarray(around[..., start - first * kind.block : stop - first * kind.block])
