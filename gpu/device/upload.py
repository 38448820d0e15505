"""The way of a step's diffs to the device: one copy, one scatter. Used by the runner and by `rows`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class Upload:
    """Collects writes to an arena (int32, flat) and sends them together. No word may be written twice in between."""

    def __init__(self, arena: torch.Tensor) -> None:
        self._arena = arena
        self._device = arena.device
        self._starts: list[int] = []
        self._parts: list[NDArray[np.int32]] = []

    def write(self, offset: int, values: Sequence[int] | NDArray[np.int32]) -> None:
        """Words to write from `offset` on."""
        if len(values):
            self._starts.append(offset)
            self._parts.append(np.asarray(values, dtype=np.int32))

    def discard(self) -> None:
        """Forget what has not been sent."""
        self._starts, self._parts = [], []

    def send(self) -> None:
        """Start copying and scattering what was written; whatever is started on the device from here on sees it."""
        if not self._starts:
            return
        lengths = [len(part) for part in self._parts]
        num_segments, num_words = len(lengths), sum(lengths)
        header = np.array([self._starts, lengths], dtype=np.int32).reshape(-1)
        staged = host_tensor(len(header) + num_words, torch.int32, self._device)
        np.concatenate([header, *self._parts], out=staged.numpy())
        self.discard()

        on_device = staged.to(self._device, non_blocking=True)
        starts, sizes, values = on_device.split([num_segments, num_segments, num_words])
        # Word i, of segment s, goes to starts[s] + (i - what lies before the segment).
        shifts = starts.long() - (sizes.long().cumsum(0) - sizes)
        indices = torch.repeat_interleave(shifts, sizes.long(), output_size=num_words)
        indices += torch.arange(num_words, device=self._device)
        self._arena.index_copy_(0, indices, values)


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
