"""KV groups: what the layers of a model keep of a request, and so what a block table is.

Layers that keep the same (all tokens, or a window of the latest) are in one or several groups of equal size. A block
has room for `block_size` tokens in the layers of one group, and any block serves any group: there is one pool.
`EngineConfig.kv_windows` has the window of each group, or None.

A block table is flat: for each place, which is `block_size` tokens, one block of every group, in their order. A group
gives a block back when no token to come sees any of its tokens; then `NO_BLOCK` stands there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NO_BLOCK = -1

KVWindows = Sequence[int | None]  # of each group: how many tokens a query sees, itself included; None: all


def owned(block_ids: Iterable[int]) -> list[int]:
    """The blocks of a table that are there."""
    return [block_id for block_id in block_ids if block_id != NO_BLOCK]


def most_blocks(windows: KVWindows, block_size: int, num_tokens: int, max_step_tokens: int) -> int:
    """The most blocks that a request of `num_tokens` tokens owns at any time, when no more than `max_step_tokens` of
    them are planned and not accounted for."""
    everything = -(-num_tokens // block_size)
    return sum(
        everything if window is None else min(everything, most_in_window(window, block_size, max_step_tokens))
        for window in windows
    )


def most_in_window(window: int, block_size: int, step_tokens: int) -> int:
    """In how many blocks of one group the tokens lie that a step of `step_tokens` tokens writes or sees."""
    return -(-(window - 1 + step_tokens) // block_size) + 1
