"""The way of a checkpoint to the device, tensor by tensor, through a little pinned memory.

Imported when weights are drawn.

A copy from pageable memory (a mapped file) first goes through a buffer of the driver's, in small pieces and one after
the other. Here two pinned buffers take turns: while one is on its way to the device, the processor fills the other from
the file. So the host holds the page cache, which is not ours, and two buffers, never a second copy of the model; and
types are converted on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

BUFFER_SIZE = 64 * 2**20  # bytes: large enough that what a copy costs besides its bytes does not matter


def to_device(
    weights: Iterable[tuple[str, torch.Tensor]], device: torch.device, buffer_size: int = BUFFER_SIZE
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors on `device`, in their own dtype and contiguous. What is there already passes.

    The device is in the middle of copying a tensor when it is yielded: only work on its current stream may use it.
    """
    buffers = _Buffers(device, buffer_size)
    for name, tensor in weights:
        yield name, tensor if tensor.device.type == device.type else buffers.copy(tensor)


class _Buffers:
    """Two buffers, and when the device is done with each. On a CPU, for tests, neither pinned nor waited for."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._memory: list[torch.Tensor] = []  # made when first needed: many a device is the host
        self._copied: list[torch.cuda.Event] = []
        self._size = size
        self._turn = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` on the device, on its way there."""
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
