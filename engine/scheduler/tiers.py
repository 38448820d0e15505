"""Blocks that are kept beside the KV cache: prefixes being loaded from there, and blocks to be stored.

A load fills the prefix cache. It owns blocks, a thread reads what belongs into them, and when all is there they are
published and given back: the request that waited for it, and every other, finds them as it finds any prefix. So a
request that is loading waits like any other and owns nothing; when it leaves, its load is dropped with its blocks, and
running requests that need those get them at once. What cannot be loaded is computed.

What is stored needs no block to be held either: a published block is taken if it still holds what it did when its turn
comes, and that is a look at the hash index.

A piece is `blocks_per_piece` places of a block table that follow each other, with the blocks of all groups there; its
name is the hash of the last, which covers every token before it. Whole pieces are read, and copied only as far as the
next token sees them. Owned by the KVCacheManager, on the engine's thread. The I/O is behind the `BlockTier`.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Protocol

from engine.config import Clock
from engine.executor import BlockTier
from engine.messages import EventKind, TierStats
from engine.plan import NO_BLOCK, owned
from engine.scheduler.block_pool import BlockPool
from engine.scheduler.request import Load, Request

logger = logging.getLogger(__name__)

PATIENCE, PAUSE = 5.0, 60.0  # seconds: for the next piece of a load, and until loading is tried again without one
MAX_BACKLOG = (
    8192  # pieces that wait to be stored; what comes beyond that is not: nothing is found before its beginning
)
BUSY_SECONDS, IDLE_SECONDS = 0.002, 0.05  # of copying what was loaded between two steps
CLOSING_SECONDS = 1.5  # of storing what waits when the engine ends
STORE_SHARE = 0.002  # of the time of steps, that may go into storing; what it costs them is several times as much
MAX_CREDIT = 4  # pieces that may be stored at a stretch
LATER_IS_WORTH = 512  # pieces after which one is worth half of the first: fewer prompts share it


class BlockTables(Protocol):
    """What tiers use of the `KVCacheManager`."""

    block_size: int
    num_groups: int
    marks: list[bytes]
    pool: BlockPool

    def block_hash(self, request: Request, index: int) -> bytes: ...
    def needs(self, num_places: int) -> list[int]: ...


class Tiers:
    """What lies in a tier, as the requests of one scheduler see it."""

    def __init__(self, kv: BlockTables, tier: BlockTier, *, only_prompts: bool) -> None:
        """`only_prompts`: blocks with generated tokens are nobody's prefix, and not stored."""
        self.tier = tier
        self.seconds_per_token = 0.0  # of prefill, as measured; 0 is unknown
        self._kv = kv
        self._only_prompts = only_prompts
        self._loads: dict[int, Load] = {}
        self._backlog: OrderedDict[bytes, tuple[list[bytes], float, bool]] = OrderedDict()
        self._credit = 0.0
        self._hits: Counter[str] = Counter()  # tokens, by tier
        self._now = self._pause_until = float("-inf")
        self.piece_tokens = tier.blocks_per_piece * kv.block_size

    @property
    def is_loading(self) -> bool:
        return bool(self._loads)

    @property
    def is_storing(self) -> bool:
        """Whether something waits to be stored, or is on its way."""
        return bool(self._backlog) or self.tier.is_storing

    # --- loading

    def begin(self, request: Request, prefix: list[int]) -> bool:
        """Begin to load what lies in the tier beyond a waiting request's cached prefix, once for each request, or join
        who loads the same beginning. Returns whether it waits for that."""
        if request.asked_tiers or not request.reads_prefix_cache or self._now < self._pause_until:
            return False
        request.asked_tiers = True
        kv, size = self._kv, self.tier.blocks_per_piece
        first = len(prefix) // kv.num_groups // size
        last = first
        while (last + 1) * size <= (request.num_tokens - 1) // kv.block_size and self.tier.find(
            kv.block_hash(request, (last + 1) * size - 1)
        ):
            last += 1
        if last == first or not self.tier.is_cheaper(self._seconds_of_piece):
            return False
        hashes = request.block_hashes[first * size : last * size]
        contents = self._contents(hashes)
        for load in self._loads.values():
            if load.contents[0] == contents[0]:
                request.asked_tiers = False  # when that has ended: its own pieces may go on where the others' do not
                return self._join(request, load)
        held = owned(prefix)
        kv.pool.share(held)
        firsts = [last * size - need for need in kv.needs(last * size)]
        is_seen = [place >= least for place in range(first * size, last * size) for least in firsts]
        if sum(is_seen) > kv.pool.num_free:  # then it has no room to run either, and asks again
            request.asked_tiers = False
            kv.pool.release(held)
            return False
        blocks = iter(kv.pool.allocate(sum(is_seen)))
        table = [next(blocks) if seen else NO_BLOCK for seen in is_seen]
        load = Load(contents, table, held, [None] * (last - first), [], self._now)
        width = size * kv.num_groups
        load.ticket = self.tier.load(
            hashes[size - 1 :: size], [table[start : start + width] for start in range(0, len(table), width)]
        )
        self._loads[load.ticket] = load
        return self._join(request, load)

    def _contents(self, hashes: Iterable[bytes]) -> list[bytes]:
        """What the blocks of these places are found by, those of all groups of a place together."""
        return [content + mark for content in hashes for mark in self._kv.marks]

    def _join(self, request: Request, load: Load) -> bool:
        request.load = load
        request.note(EventKind.LOADING, self._now, len(load.sources) * self.piece_tokens)
        load.requests.append(request)
        return True

    def poll(self, now: float, *, is_busy: bool) -> None:
        """Take in what has been loaded since the last step. A load that stands still is over: the rest is computed."""
        self._now = now
        for ticket, index, source in self.tier.poll(BUSY_SECONDS if is_busy else IDLE_SECONDS):
            load = self._loads[ticket]
            load.sources[index], load.news = source or "", now
            if None not in load.sources:
                self._finish(load, now)
        for load in [load for load in self._loads.values() if now - load.news > PATIENCE]:
            logger.warning("KV blocks could not be loaded within %d s; nothing is loaded for %d s", PATIENCE, PAUSE)
            self._pause_until = now + PAUSE
            self._finish(load, now)

    def _finish(self, load: Load, now: float) -> None:
        """Everything has come that will or is waited for: what of it continues the prefix can be found from now on."""
        size, pool = self.tier.blocks_per_piece, self._kv.pool
        had = [source or "" for source in load.sources]
        num_pieces = had.index("") if "" in had else len(had)
        width = num_pieces * size * self._kv.num_groups
        for block_id, content in zip(load.block_ids[:width], load.contents, strict=False):
            if block_id != NO_BLOCK:
                pool.publish(block_id, content)
        names = load.contents[(size - 1) * self._kv.num_groups :: size * self._kv.num_groups]
        pieces = dict(zip(names, had[:num_pieces], strict=False))
        self._hits += self._tokens_by_tier(pieces.values())
        for request in load.requests:  # of a load that was joined some pieces may be others' alone
            own = [pieces[name] for name in request.block_hashes if name in pieces]
            for source, number in self._tokens_by_tier(own).items():
                request.note(EventKind.LOADED_FROM_RAM if source == "ram" else EventKind.LOADED_FROM_DISK, now, number)
        self._drop(load)

    def _tokens_by_tier(self, sources: Iterable[str]) -> Counter[str]:
        """Of pieces that came from these tiers."""
        return Counter({tier: n * self.piece_tokens for tier, n in Counter(sources).items()})

    def leave(self, request: Request) -> None:
        """The request does not wait for a load any more. One that nobody waits for is dropped."""
        load = request.load
        if load is not None:
            request.load = None
            load.requests.remove(request)
            if not load.requests:
                self._drop(load)

    def give_up(self) -> None:
        """Somebody who runs needs blocks: whoever waits for a load computes instead."""
        for load in list(self._loads.values()):
            for request in load.requests:
                request.asked_tiers = True
            self._drop(load)

    def _drop(self, load: Load) -> None:
        self.tier.cancel(load.ticket)
        del self._loads[load.ticket]
        self._kv.pool.release(load.prefix + owned(load.block_ids))
        for request in load.requests:
            request.load = None

    # --- storing

    def note_published(self, request: Request, start: int, end: int) -> None:
        """The request's blocks `start` .. `end` - 1 can be found now: those that complete a piece are to be stored, and
        what is missing of the prefix that it was given, without which nobody could load them."""
        if request.is_private or start == end:
            return
        kv, size = self._kv, self.tier.blocks_per_piece
        for piece in range(0 if start * kv.block_size == request.num_cached_tokens else start // size, end // size):
            stop = (piece + 1) * size
            if self._only_prompts and stop * kv.block_size > request.num_prompt_tokens:
                return
            name = kv.block_hash(request, stop - 1)
            if len(self._backlog) == MAX_BACKLOG:
                return
            if name not in self._backlog and not self.tier.find(name) and self.tier.is_cheaper(self._seconds_of_piece):
                worth = (self._seconds_of_piece or 1e-3) / (1 + piece / LATER_IS_WORTH)
                contents = self._contents(request.block_hashes[stop - size : stop])
                self._backlog[name] = contents, worth, request.keeps_prefix

    def write_back(self, seconds: float | None) -> None:
        """Let some of what waits be stored, after a step of so many seconds; None: there is nothing else to do."""
        if seconds is not None:
            self._credit = min(self._credit + STORE_SHARE * seconds, MAX_CREDIT * self.tier.store_seconds)
        find = self._kv.pool.find
        while self._backlog and (seconds is None or self._credit >= 0):
            name, (contents, worth, is_living) = next(iter(self._backlog.items()))
            block_ids = [block_id for content in contents if (block_id := find(content)) is not None]
            if len(block_ids) == len(contents):
                if not self.tier.store(name, block_ids, worth, is_living=is_living):
                    return
                self._credit -= self.tier.store_seconds
            del self._backlog[name]

    def store_rest(self, clock: Clock) -> None:
        """At the end of a healthy engine: store what waits, for a moment."""
        num_pieces, end = len(self._backlog), clock() + CLOSING_SECONDS
        self.write_back(None)
        while self._backlog and clock() < end:
            self.tier.wait()
            self.write_back(None)
        if self._backlog:
            logger.warning("%d of %d pieces that waited were not stored before the end", len(self._backlog), num_pieces)

    def withdraw(self, request: Request) -> None:
        """What the request has computed cannot be trusted, also what is stored of it."""
        self.give_up()
        size = self.tier.blocks_per_piece
        names = request.block_hashes[size - 1 :: size]
        for name in names:
            self._backlog.pop(name, None)
        self.tier.discard(names)

    def tables(self) -> list[list[int]]:
        """The blocks that loads hold, for who checks the accounts."""
        return [load.prefix + owned(load.block_ids) for load in self._loads.values()]

    def take_stats(self) -> list[TierStats] | None:
        """What has happened in the tiers since the last time; None if nothing has."""
        stats = self.tier.take_stats()
        if stats is not None and self._hits:
            for each in stats:
                each.hit_tokens = self._hits.pop(each.tier, 0)
        return stats

    @property
    def _seconds_of_piece(self) -> float:
        return self.seconds_per_token * self.piece_tokens
