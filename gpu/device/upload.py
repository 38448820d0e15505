"""The way of a step's diffs to the device: one copy, one scatter. Used by the runner and by `rows`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from numpy.typing import NDArray

from gpu.kernels import scatter_words


class Upload:
    """Collects writes to a buffer (int32, flat) and sends them together. No word may be written twice in between."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._device = buffer.device
        self._starts: list[int] = []  # of the segments, each of which goes to consecutive words
        self._lengths: list[int] = []
        self._words: list[int] = []  # of all segments

    @property
    def num_words(self) -> int:
        """How many words have been written since the last time they were sent."""
        return len(self._words)

    def write(self, offset: int, words: Sequence[int]) -> None:
        """Words to write from `offset` on, as signed numbers of 32 bits."""
        if words:
            self._starts.append(offset)
            self._lengths.append(len(words))
            self._words += words

    def discard(self) -> None:
        """Forget what has not been sent."""
        self._starts, self._lengths, self._words = [], [], []

    def send(self) -> None:
        """Start copying and scattering what was written; whatever is started on the device from here on sees it."""
        if not self._starts:
            return
        sources = [0, *accumulate(self._lengths[:-1])]
        staged = host_tensor(3 * len(sources) + len(self._words), torch.int32, self._device)
        staged.numpy()[:] = [*self._starts, *self._lengths, *sources, *self._words]
        self.discard()
        scatter_words(self._buffer, staged.to(self._device, non_blocking=True), len(sources))


def host_tensor(size: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory for a copy from or to this device that nobody waits for: pinned, where it is a card.

    torch keeps pinned memory for the next to ask, and gives none away that a copy on its way still uses.
    """
    return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")


def on_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy of what only some steps need; nobody waits for it."""
    staged = host_tensor(array.shape, torch.from_numpy(array[:0]).dtype, device)
    staged.copy_(torch.from_numpy(array))
    return staged.to(device, non_blocking=True)
