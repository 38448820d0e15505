"""Tensor ranks by torch.distributed, and tensors in shared memory.

NCCL between several devices was never tested, for lack of such a machine; its code differs only in the backend's name.
Its collectives may be captured in a CUDA graph. NCCL's own watchdog ends a rank that waits too long in an eager
collective, but not in a replayed graph: there, only the driver notices the end of another rank's process.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from engine.errors import RankLost
from gpu.cpu.communicator import SharedMemoryCommunicator
from gpu.sharding import Layout

TIMEOUT = 60.0  # seconds that a rank may be behind another one


class TorchCommunicator:
    """A `gpu.sharding.Communicator` by torch.distributed, at most one in a process."""

    def __init__(self, store: Any, layout: Layout, device: torch.device | str, timeout: float = TIMEOUT) -> None:
        """Wait for the other ranks. `store` is a `torch.distributed.Store`, which all ranks of the world may share."""
        self.rank, self.size = layout.tp_rank, layout.tensor_parallel_size
        self._rank_of_world = layout.rank
        with self._deadline():
            dist.init_process_group(
                backend="nccl" if torch.device(device).type == "cuda" else "gloo",
                store=dist.PrefixStore(f"stage {layout.pp_rank}", store),  # type: ignore[attr-defined]
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=timeout),
                device_id=torch.device(device) if torch.device(device).type == "cuda" else None,
            )

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        with self._deadline():
            dist.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        most = max(sizes)
        padded = F.pad(tensor, (0, most - sizes[self.rank])).contiguous()
        parts = [torch.empty_like(padded) for _ in sizes]
        with self._deadline():
            dist.all_gather(parts, padded)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)

    def all_to_all(self, rows: torch.Tensor, sizes: Sequence[Sequence[int]]) -> torch.Tensor:
        sent, received = list(sizes[self.rank]), [of_rank[self.rank] for of_rank in sizes]
        output = rows.new_empty(sum(received), *rows.shape[1:])
        with self._deadline():
            dist.all_to_all_single(output, rows.contiguous(), received, sent)
        return output

    @contextmanager
    def _deadline(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # any failure: a deadline, a closed connection
            raise RankLost(
                self._rank_of_world, socket.gethostname(), "failed in a collective (timeout or closed connection)"
            ) from error


# ------------------------------------------------------------------------------------------------------- shared tensors
# The tensor ranks of one machine for torch on its CPU, over the shared memory of `gpu.cpu.communicator`. Messages of
# gloo take longer than most layers of a small model.


class SharedTensors:
    """A `gpu.sharding.Communicator` of tensors on the CPU. Sums are made in float32."""

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
        # Each rank reads all rows, which is cheap: they are in shared memory, and there are few ranks.
        width = rows.shape[1]
        gathered = self.all_gather(rows.flatten(), [sum(of_rank) * width for of_rank in sizes]).view(-1, width)
        parts = gathered.split([size for of_rank in sizes for size in of_rank])
        return torch.cat(parts[self.rank :: self.size])
