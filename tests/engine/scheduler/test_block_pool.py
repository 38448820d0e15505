"""The pool of KV blocks against a model that keeps the same accounts the slow way."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.scheduler.block_pool import BlockPool


class BlockPoolMachine(RuleBasedStateMachine):
    """Requests allocate, share, publish and release; the model knows who owns each block and what can be found."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables: list[list[int]] = []
        self.contents: dict[bytes, int] = {}
        self.free = list(range(num_blocks))  # in the order of eviction
        self.kept: set[int] = set()

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.pool.num_free))
        block_ids = self.pool.allocate(count)
        expected: list[int] = []
        while len(expected) < count:
            block_id = self.free.pop(0)
            if block_id in self.kept and block_id in self.contents.values():
                self.free.append(block_id)
            else:
                expected.append(block_id)
            self.kept.discard(block_id)
        assert block_ids == expected
        self.contents = {content: i for content, i in self.contents.items() if i not in block_ids}
        self.tables.append(block_ids)

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        contents = data.draw(st.lists(st.sampled_from(sorted(self.contents)), min_size=1, unique=True))
        block_ids = [self.contents[content] for content in contents]
        assert [self.pool.find(content) for content in contents] == block_ids
        self.pool.share(block_ids)
        self.free = [i for i in self.free if i not in block_ids]
        self.tables.append(block_ids)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), content=st.binary(min_size=1, max_size=1))
    def publish(self, data: st.DataObject, content: bytes) -> None:
        owned = sorted({i for table in self.tables for i in table} - set(self.contents.values()))
        if owned:
            block_id = data.draw(st.sampled_from(owned))
            self.pool.publish(block_id, content)
            self.contents.setdefault(content, block_id)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), keep=st.booleans(), is_unlikely=st.booleans())
    def release(self, data: st.DataObject, keep: bool, is_unlikely: bool) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        if keep:
            self.pool.keep(table)
            self.kept.update(table)
        self.pool.release(table, is_unlikely=is_unlikely)
        still_owned = {i for other in self.tables for i in other}
        for block_id in reversed(table):
            if block_id not in still_owned:
                stays = block_id in self.contents.values() and not is_unlikely
                self.free.insert(len(self.free) if stays else 0, block_id)

    @invariant()
    def books_balance(self) -> None:
        self.pool.check_integrity(self.tables)
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_cached == len(self.contents)
        for content, block_id in self.contents.items():
            assert self.pool.find(content) == block_id


TestBlockPoolAccounting = BlockPoolMachine.TestCase
TestBlockPoolAccounting.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_worthless_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(3)
    first, second, third = pool.allocate(3)
    pool.publish(first, b"first")
    pool.release([first])
    pool.release([second])
    assert pool.allocate(1) == [second]
    assert pool.find(b"first") == first
    pool.release([third])
    assert pool.allocate(1) == [third]
    assert pool.allocate(1) == [first]
    assert pool.find(b"first") is None


def test_the_end_of_the_least_recently_used_sequence_is_evicted_first() -> None:
    pool = BlockPool(4)
    old, recent = pool.allocate(2), pool.allocate(2)
    for block_id in (*old, *recent):
        pool.publish(block_id, bytes([block_id]))
    pool.release(old)
    pool.release(recent)
    assert pool.allocate(4) == [old[1], old[0], recent[1], recent[0]]


def test_what_is_kept_outlives_what_was_used_later_but_not_for_ever() -> None:
    pool = BlockPool(3)
    kept, *others = pool.allocate(3)
    for block_id in (kept, *others):
        pool.publish(block_id, bytes([block_id]))
    pool.keep([kept])
    pool.release([kept])
    pool.release(others)
    assert pool.allocate(2) == others[::-1]
    assert pool.find(bytes([kept])) == kept
    assert pool.allocate(1) == [kept]


def test_a_shared_block_is_free_only_when_its_last_owner_lets_go() -> None:
    pool = BlockPool(1)
    table = pool.allocate(1)
    pool.share(table)
    pool.release(table)
    assert pool.num_free == 0
    assert not pool.is_free(table[0])
    pool.release(table)
    assert pool.num_free == 1


@pytest.mark.parametrize("tables", [[], [[0], [0]], [[1]]])
def test_check_integrity_notices_tables_that_do_not_match(tables: list[list[int]]) -> None:
    pool = BlockPool(2)
    assert pool.allocate(1) == [0]
    pool.check_integrity([[0]])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity(tables)
