"""Collectives among the tensor ranks of one stage. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Communicator(Protocol):
    """One of `size` ranks, for one thread at a time. All make the same calls in the same order.

    Each call raises RankLost where another rank does not come before a deadline.
    """

    rank: int
    size: int

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        """`tensor` becomes the sum over all ranks: the same bits on each."""
        ...

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """[..., sizes[rank]] of each rank -> [..., sum of sizes], in the order of the ranks."""
        ...

    def all_to_all(self, rows: torch.Tensor, sizes: Sequence[Sequence[int]]) -> torch.Tensor:
        """Rank a sends rank b `sizes[a][b]` rows: [sum of sizes[rank], n], in the order of their destinations ->
        [sum of sizes[a][rank] over a, n], in the order of their sources."""
        ...
