"""The tensor ranks of one machine for torch on its CPU, over the shared memory of `gpu.cpu.communicator`.

gloo's messages cost more than what most layers of a small model compute.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gpu.cpu.communicator import SharedMemoryCommunicator


class SharedTensors:
    """A `gpu.parallel.communicator.Communicator` of tensors on the CPU. Sums are made in float32."""

    def __init__(self, ranks: SharedMemoryCommunicator) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self._ranks = ranks

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        values = tensor.float().contiguous()
        self._ranks.all_reduce_(values.view(-1).numpy())
        if values is not tensor:
            tensor.copy_(values)

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        rows = tensor.shape[:-1].numel()
        values = tensor if tensor.dtype == torch.float64 else tensor.float()
        words = values.itemsize // 4  # that are gathered as they are
        own = np.frombuffer(values.numpy().tobytes(), np.float32)
        gathered = self._ranks.all_gather(own, [rows * size * words for size in sizes])
        parts = torch.from_numpy(gathered).view(values.dtype).split([rows * size for size in sizes])
        shaped = [part.view(*tensor.shape[:-1], size) for part, size in zip(parts, sizes, strict=True)]
        return torch.cat(shaped, dim=-1).to(tensor.dtype)

    def all_to_all(self, rows: torch.Tensor, sizes: Sequence[Sequence[int]]) -> torch.Tensor:
        # All read what all have: that is memory which they share, and their number is small.
        width = rows.shape[1]
        gathered = self.all_gather(rows.flatten(), [sum(of_rank) * width for of_rank in sizes]).view(-1, width)
        parts = gathered.split([size for of_rank in sizes for size in of_rank])
        return torch.cat(parts[self.rank :: self.size])
