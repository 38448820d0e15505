"""Which pieces are given up first: those that save the fewest seconds for each byte, soonest those not asked for since.

A piece's rank is what it is worth, times how often it was wanted, above the rank of what was last given up (Cherkasova,
"Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching", 1998). That floor rises as pieces are given
up, so what was popular once goes in the end; and whatever passes through only once gives way to itself first, however
much of it there is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

MOST_HITS = 15  # that count: what was wanted more often is not kept for longer
LIVING = 4.0  # how many times as much a piece of a conversation is worth that may go on
SLACK = 0.05  # of the room is made at once, so that pieces need not be ranked for each that comes

T = TypeVar("T")


def rank(floor: float, worth: float, hits: int) -> float:
    """`worth` is in seconds saved per MB."""
    return floor + worth * (1 + min(hits, MOST_HITS))


def victims(entries: Iterable[tuple[float, int, T]], total: int, limit: int) -> list[tuple[float, int, T]]:
    """The entries (rank, bytes, what) to give up, the least worth first, so that of `total` bytes a little less than
    `limit` are left; none if they are no more than that."""
    found: list[tuple[float, int, T]] = []
    if total > limit:
        for entry in sorted(entries, key=lambda each: each[0]):
            if total <= limit * (1 - SLACK):
                break
            found.append(entry)
            total -= entry[1]
    return found
