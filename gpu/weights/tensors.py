"""Weights as torch tensors on a device, through pinned staging buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from gpu.checkpoint import ModelConfig, ModelFiles, QuantizedRows
from gpu.checkpoint.architecture import DecoderSpec
from gpu.checkpoint.families.table import spec_of
from gpu.checkpoint.quantized_rows import PackedRows
from gpu.checkpoint.tensors import Weight, shapes_of
from gpu.weights.reading import STANDARD_DEVIATION, dummy_seed, read_weights


def weights_of(files: ModelFiles, device: str = "cpu", spec: DecoderSpec | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the weights of `gpu.weights.reading.read_weights` as tensors on `device`, in the dtype of the file, or in
    float32 if it is quantized and not kept so.

    On the CPU the tensors may share memory with the mapped file. To another device they are copied one at a time,
    through two staging buffers.
    """
    if device == "cpu":
        return as_tensors(read_weights(files, spec))
    if files.tensors is None:
        return drawn_on(files.config, device, spec, files.seed)
    return to_device(as_tensors(read_weights(files, spec)), torch.device(device))


def as_tensors(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the weights as tensors; quantized ones become float32, except packed rows that a kernel computes with."""
    for name, weight in weights:
        yield name, weight if isinstance(weight, (torch.Tensor, QuantizedMatrix)) else _tensor(weight)


def drawn_on(
    config: ModelConfig, device: str, spec: DecoderSpec | None = None, seed: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield random weights like `gpu.weights.reading.dummy_weights`, but drawn on the device: for a large model that
    takes a second instead of minutes. The values differ, also between a rank's part and a whole tensor."""
    dtype = getattr(torch, config.torch_dtype)
    for name, shape in shapes_of(spec or spec_of(config)).items():
        tensor = torch.ones(shape, dtype=dtype, device=device)
        if not name.endswith("norm.weight"):
            generator = torch.Generator(device).manual_seed(dummy_seed(name, seed))
            tensor.normal_(0.0, STANDARD_DEVIATION, generator=generator)
        yield name, tensor


def _tensor(weight: Weight) -> torch.Tensor | QuantizedMatrix:
    if isinstance(weight, PackedRows) and (fields := weight.fields()) is not None:
        arrays = {name: torch.from_numpy(value) for name, value in fields.items() if isinstance(value, np.ndarray)}
        return QuantizedMatrix(**fields | arrays)
    if isinstance(weight, (QuantizedRows, PackedRows)):
        return torch.from_numpy(weight.dequantize())
    if weight.dtype == np.uint16:
        return torch.from_numpy(weight.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(weight)


@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantized matrix on a device, packed by `gpu.checkpoint.quantized_rows.PackedRows`."""

    numbers: torch.Tensor  # uint8 [outputs, bytes]; of 4 bits, a byte has inputs j and j + columns of 2 columns
    scales: torch.Tensor  # float32 [groups, outputs]
    zeros: torch.Tensor | None  # uint8 [groups, outputs]; None: all are `zero`
    order: torch.Tensor | None  # int64 [inputs]: the inputs in the order of the columns, if that differs
    zero: int
    bits: int  # of an integer in `numbers`, 4 or 8; 0: E4M3
    group: int  # inputs; 0: all
    columns: int  # inputs that a program multiplies at a time

    @property
    def shape(self) -> tuple[int, int]:
        return self.numbers.shape[0], self.numbers.shape[1] * (2 if self.bits == 4 else 1)

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedMatrix:
        """Return the matrix with each of its tensors changed."""
        tensors: dict[str, Any] = {
            name: change(value) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        return replace(self, **tensors)

    def fits(self, other: QuantizedMatrix) -> bool:
        """Return True if the matrices can be one: they have the same inputs in the same order and the same form."""
        forms = [(each.shape[1], each.zero, each.bits, each.group, each.columns) for each in (self, other)]
        orders = (self.zeros, other.zeros), (self.order, other.order)
        if forms[0] != forms[1] or any((one is None) != (another is None) for one, another in orders):
            return False
        return self.order is None or other.order is None or torch.equal(self.order, other.order)

    def dequantize(self) -> torch.Tensor:
        """Return float32 [outputs, inputs], in the order of the columns."""
        values: torch.Tensor = self.numbers
        if self.bits == 4:
            tiles = values.unflatten(1, (-1, 1, self.columns))
            values = torch.cat((tiles & 15, tiles >> 4), 2).flatten(1)
        values = (values if self.bits else values.view(torch.float8_e4m3fn)).float()
        size = self.group or self.shape[1]
        scales, zeros = (
            each.float().repeat_interleave(size, 0)[: self.shape[1]].T
            for each in (self.scales, self.zero + torch.zeros_like(self.scales) if self.zeros is None else self.zeros)
        )
        return (values - zeros) * scales


# -------------------------------------------------------------------------------------------------------------- staging
# A copy from pageable memory (a mapped file) goes through a buffer of the driver, in small parts and one after the
# other. Here two pinned buffers take turns: while one is copied to the device, the processor fills the other from the
# file. So the host needs two buffers besides the page cache, never a copy of the model. Types are converted on the
# device.


BUFFER_SIZE = 64 * 2**20  # bytes: large enough that the fixed cost of a copy does not matter


def to_device(
    weights: Iterable[tuple[str, Any]], device: torch.device, buffer_size: int = BUFFER_SIZE
) -> Iterator[tuple[str, Any]]:
    """Yield the tensors on `device`, in their own dtype and contiguous. Tensors that are there already are not copied.

    The device may still be copying a tensor when it is yielded: only work on its current stream may use it.
    """
    buffers = _Buffers(device, buffer_size)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device.type == device.type else buffers.copy(tensor)

    for name, weight in weights:
        yield name, moved(weight) if isinstance(weight, torch.Tensor) else weight.mapped(moved)


class _Buffers:
    """Two staging buffers, and an event for the end of the device's copy from each. On a CPU (in tests), they are not
    pinned, and nothing waits."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._memory: list[torch.Tensor] = []  # allocated at first use
        self._copied: list[torch.cuda.Event] = []
        self._size = size
        self._turn = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source = tensor.contiguous().reshape(-1).view(torch.uint8)
        flat = target.reshape(-1).view(torch.uint8)
        for start in range(0, len(source), self._size):
            part = source[start : start + self._size]
            buffer = self._next()[: len(part)]
            buffer.copy_(part)
            flat[start : start + len(part)].copy_(buffer, non_blocking=True)
            if self._is_cuda:
                self._copied[self._turn].record()
        return target

    def _next(self) -> torch.Tensor:
        if not self._memory:
            self._memory = [torch.empty(self._size, dtype=torch.uint8, pin_memory=self._is_cuda) for _ in range(2)]
            self._copied = [torch.cuda.Event() for _ in range(2)] if self._is_cuda else []
        self._turn = 1 - self._turn
        if self._is_cuda:
            self._copied[self._turn].synchronize()  # at once, if it was never recorded
        return self._memory[self._turn]
