"""The tensor ranks of a stage by torch.distributed: NCCL between CUDA devices, gloo on a CPU.

NCCL between several devices has never run here, for want of a machine with two; what is written for it is the same
but for the backend's name. Its collectives may be captured in a CUDA graph. NCCL's own watchdog ends a rank that waits
too long in an eager collective. It does not watch collectives of a replayed graph: there, only the end of another
rank's process is noticed, by the driver.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from engine.errors import RankLost
from gpu.parallel.layout import Layout

TIMEOUT = 60.0  # seconds: what a rank may be behind another, of which nobody has found that it is gone


class TorchCommunicator:
    """A `gpu.parallel.communicator.Communicator`; there is one in a process."""

    def __init__(self, store: Any, layout: Layout, device: torch.device | str, timeout: float = TIMEOUT) -> None:
        """Waits for the others. `store` is a `torch.distributed.Store`, which all ranks of the world may share."""
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
        except RuntimeError as error:  # of all kinds: a deadline, a connection that is closed
            raise RankLost(self._rank_of_world, socket.gethostname(), "has waited in vain for another rank") from error
