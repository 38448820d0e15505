"""What the tensor ranks of one stage tell each other within a layer. Torch-free."""

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
        """[..., sizes[rank]] of each -> [..., sum of sizes], in the order of the ranks"""
        ...

    def all_to_all(self, rows: torch.Tensor, sizes: Sequence[Sequence[int]]) -> torch.Tensor:
        """`sizes[a][b]` is how many rows rank a has for rank b: [sum of sizes[rank], n], those for the first rank
        first, -> those that all have for this rank, in the order of the ranks."""
        ...
