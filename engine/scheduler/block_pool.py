"""The pool of KV blocks: their owners, their reference counts, and the index of their content.

A block is in exactly one of three states:

    owned   ref_count > 0: in the block tables of that many requests
    cached  ref_count = 0, in the free list, and its content can be found by its hash
    free    ref_count = 0, in the free list, content worthless

The content of an owned block may be in the index too (a running request shares its prefix). Allocation takes the head
of the free list: free blocks and those unlikely to be reused, then cached ones, the least recently used first. A block
that `keep` marked goes to the end of the list when it first reaches the head. All operations are O(1), amortized.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from engine.snapshot import BlocksSnapshot

MOST_CELLS = 1024  # characters of the map in a snapshot


class BlockPool:
    """Reference-counted KV blocks with ids 0 .. num_blocks - 1. Owned by the KVCacheManager."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._kept: set[int] = set()
        self.on_removed: Callable[[int], None] | None = None  # called with a block when its content leaves the index
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """The number of blocks without an owner, whether or not their content can still be found."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """The number of blocks with content in the index, owned or not."""
        return len(self._by_hash)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with one reference each. The caller has checked `num_free`."""
        block_ids = [self._next_free() for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
            self._forget(block_id)
        return block_ids

    def _forget(self, block_id: int) -> None:
        content = self._hashes[block_id]
        if content is not None:
            del self._by_hash[content]
            self._hashes[block_id] = None
            if self.on_removed is not None:
                self.on_removed(block_id)

    def _next_free(self) -> int:
        """Return the head of the free list. A kept block goes to the end of the list once instead."""
        while True:
            block_id, _ = self._free.popitem(last=False)
            if block_id not in self._kept:
                return block_id
            self._kept.remove(block_id)
            if self._hashes[block_id] is None:
                return block_id
            self._free[block_id] = None

    def keep(self, block_ids: Iterable[int]) -> None:
        """Evict these blocks later than others used at the same time, because a request is expected to need them."""
        self._kept.update(block_ids)

    def is_free(self, block_id: int) -> bool:
        return self._ref_counts[block_id] == 0

    def find(self, content: bytes) -> int | None:
        """Return the block that holds this content, or None. Takes no reference."""
        return self._by_hash.get(content)

    def share(self, block_ids: Iterable[int]) -> None:
        """Take one more reference to each of these blocks, which `find` returned."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def publish(self, block_id: int, content: bytes) -> None:
        """Index an owned, fully computed block. If this content is already indexed, the earlier block stays."""
        if content not in self._by_hash:
            self._by_hash[content] = block_id
            self._hashes[block_id] = content

    def withdraw(self, block_ids: Iterable[int]) -> None:
        """Remove blocks from the index because their content has turned out to be wrong."""
        for block_id in block_ids:
            self._forget(block_id)

    def release(self, block_ids: Sequence[int], *, is_unlikely: bool = False) -> None:
        """Give back one reference for each block of a request's table, in table order.

        The tail of a sequence is the least likely to be shared, so it is evicted first: the free list gets the blocks
        in reverse. Blocks that are unlikely to be found again are evicted before all others.
        """
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if self._hashes[block_id] is None or is_unlikely:
                    self._free.move_to_end(block_id, last=False)

    def snapshot(self, groups: Mapping[int, int]) -> BlocksSnapshot:
        """Return the number of blocks in each state, and a map of all blocks. Takes about 50 ns per block. `groups` has
        the KV group of blocks outside the first group.
        """
        stride = -(-self.num_blocks // MOST_CELLS)
        by_ref_count = Counter(self._ref_counts)
        num_cached = list(map(self._ref_counts.__getitem__, self._by_hash.values())).count(0)
        return BlocksSnapshot(
            num_owned=self.num_blocks - self.num_free,
            num_cached=num_cached,
            num_free=self.num_free - num_cached,
            by_ref_count={count: number for count, number in sorted(by_ref_count.items()) if count},
            map="".join(self._cell(block_id, groups) for block_id in range(0, self.num_blocks, stride)),
            map_stride=stride,
        )

    def _cell(self, block_id: int, groups: Mapping[int, int]) -> str:
        count = self._ref_counts[block_id]
        if count == 0:
            return "." if self._hashes[block_id] is None else "-"
        return chr((97 if count == 1 else 65) + min(groups.get(block_id, 0), 25))

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the pool agrees with the block tables of all live requests."""
        expected = [0] * self.num_blocks
        for table in block_tables:
            for block_id in table:
                expected[block_id] += 1
        if expected != self._ref_counts:
            wrong = [i for i in range(self.num_blocks) if expected[i] != self._ref_counts[i]]
            raise AssertionError(f"reference counts differ from block tables at blocks {wrong[:8]}")
        if set(self._free) != {i for i, count in enumerate(self._ref_counts) if count == 0}:
            raise AssertionError("the free list is not the set of blocks without owner")
        if {content: i for i, content in enumerate(self._hashes) if content is not None} != self._by_hash:
            raise AssertionError("the hash index differs from the blocks' contents")
