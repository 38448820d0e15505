"""Tensors of a Hugging Face checkpoint that hold the parts of many experts, taken apart as they are read.

MXFP4 (Open Compute Project, "Microscaling Formats"): blocks of 32 numbers of 4 bits, 1 for the sign, 2 for the exponent
and 1 for the mantissa, with a power of two as their scale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.checkpoint.architecture import Part, parts_of
from gpu.checkpoint.config import ModelConfig
from gpu.checkpoint.families import spec_of
from gpu.checkpoint.quantized_rows import MXFP4_DOUBLED, QuantizedRows, q8_0_of_powers

_BLOCK = 32
_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class MXFP4Rows:
    """Rows as such a checkpoint has them: views of the mapped file."""

    blocks: NDArray[np.uint8]  # [rows, blocks, 16], the first of two numbers in the lower bits
    scales: NDArray[np.uint8]  # [rows, blocks], 127 more than the exponent of each

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[0], self.scales.shape[1] * _BLOCK

    def read(self) -> QuantizedRows | NDArray[np.float32]:
        """The same numbers, exactly: as Q8_0, if all scales fit its float16, which is so for weights of any model."""
        nibbles = np.stack([self.blocks & np.uint8(15), self.blocks >> np.uint8(4)], axis=-1)
        doubled = MXFP4_DOUBLED[nibbles].reshape(*self.scales.shape, _BLOCK)
        exponents = self.scales.astype(np.int32) - 128
        rows = q8_0_of_powers(exponents, doubled, self.shape)
        return (
            rows if rows is not None else np.ldexp(doubled.astype(np.float32), exponents[..., None]).reshape(self.shape)
        )


def unstacked(found: Iterable[tuple[str, NDArray[Any]]], config: ModelConfig) -> Iterator[tuple[str, Any]]:
    """The tensors of a checkpoint, each stack of them as views of its parts: arrays, or MXFP4Rows.

    A stack of another number of parts, of another type or without its scales is passed on under its own name, which has
    no place.
    """
    stacks: dict[str, list[Part]] = defaultdict(list)
    for part in parts_of(spec_of(config)):
        if part.stack is not None:
            stacks[part.stack.name].append(part)
    waiting: dict[str, NDArray[Any]] = {}
    for name, array in found:
        stem = next((name.removesuffix(end) for end in (_BLOCKS, _SCALES) if name.endswith(end)), None)
        if stem in stacks:
            waiting[name] = array
            if stem + _BLOCKS in waiting and stem + _SCALES in waiting:
                blocks, scales = waiting.pop(stem + _BLOCKS), waiting.pop(stem + _SCALES)
                yield from _rows(stem, stacks[stem], blocks, scales)
        elif name in stacks and array.ndim == 3:
            yield from _parts(name, stacks[name], array.swapaxes(1, 2), "weight")
        elif name.endswith("_bias") and name.removesuffix("_bias") in stacks and array.ndim == 2:
            yield from _parts(name, stacks[name.removesuffix("_bias")], array, "bias")
        else:
            yield name, array
    yield from waiting.items()


def _parts(name: str, parts: list[Part], array: NDArray[Any], kind: str) -> Iterator[tuple[str, NDArray[Any]]]:
    """Of an array [experts, outputs, ...]"""
    if not _fits(parts, array):
        yield name, array
        return
    for part in parts:
        assert part.stack is not None
        yield f"{part.name}.{kind}", array[part.expert, part.stack.start :: part.stack.step]


def _rows(
    name: str, parts: list[Part], blocks: NDArray[np.uint8], scales: NDArray[np.uint8]
) -> Iterator[tuple[str, Any]]:
    are_bytes = blocks.dtype == scales.dtype == np.uint8
    if not are_bytes or scales.ndim != 3 or blocks.shape != (*scales.shape, _BLOCK // 2) or not _fits(parts, blocks):
        yield from ((name + _BLOCKS, blocks), (name + _SCALES, scales))
        return
    pairs = zip(_parts(name, parts, blocks, "weight"), _parts(name, parts, scales, "weight"), strict=True)
    for (part, some), (_, theirs) in pairs:
        yield part, MXFP4Rows(some, theirs)


def _fits(parts: list[Part], array: NDArray[Any]) -> bool:
    return len(array) == len({part.expert for part in parts})
