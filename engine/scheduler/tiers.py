"""Prefixes in tiers outside the KV cache: their loading into the prefix cache, and the storing of blocks.

1. A load owns blocks, and a thread reads their contents. When all are read, the blocks are published and released, and
   any request finds them like any cached prefix. A loading request waits and owns no blocks; when it leaves, its load
   is dropped, and running requests get the blocks at once. Blocks that cannot be loaded are computed.
2. Storing holds no blocks: a published block is stored only if the hash index still has its content.
3. A chunk is `blocks_per_chunk` consecutive places of a block table, with the blocks of all KV groups. It is identified
   by the hash of its last place, which covers every token before it. Only blocks that the next token sees are loaded.

Owned by the KVCacheManager, on the engine's thread. The `BlockTier` does the I/O.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Protocol

from engine.costs.table import StepBudget
from engine.executor import BlockTier
from engine.messages import EngineCoreOutputs, EventKind
from engine.plan import NO_BLOCK, owned
from engine.scheduler.block_pool import BlockPool
from engine.scheduler.request import Load, Request
from engine.scheduler.steps import EndedStep
from engine.snapshot import StepOutcome

logger = logging.getLogger(__name__)

PATIENCE, PAUSE = 5.0, 60.0  # seconds: how long a load waits for its next chunk, and how long no load begins after that
MAX_BACKLOG = 8192  # chunks; further ones are not stored, because a chunk is useless without those before it
BUSY_SECONDS, IDLE_SECONDS = 0.002, 0.05  # limits on copying loaded blocks between two steps
CLOSING_SECONDS = 1.5  # limit on storing the backlog when the engine ends
STORE_SHARE = 0.002  # share of step time that storing may take; it delays steps by several times as much
MAX_CREDIT = 4  # chunks that may be stored in a row
_USED = b"used:"  # prefix of the keys of backlog entries that mark a prompt's chunks as used


class BlockTables(Protocol):
    """The part of the `KVCacheManager` that `Tiers` uses."""

    block_size: int
    num_groups: int
    marks: list[bytes]
    pool: BlockPool

    def block_hash(self, request: Request, index: int) -> bytes: ...
    def needs(self, num_places: int) -> list[int]: ...


class Tiers:
    """The loads and the backlog of stores of one scheduler's requests."""

    def __init__(self, kv: BlockTables, tier: BlockTier, pacing: StepBudget, *, only_prompts: bool) -> None:
        """`only_prompts`: do not store blocks with generated tokens, because no prompt can share them."""
        self.tier = tier
        self._kv = kv
        self._pacing = pacing
        self._only_prompts = only_prompts
        self._loads: dict[int, Load] = {}
        self._backlog: OrderedDict[bytes, list[bytes]] = OrderedDict()
        self._credit = 0.0
        self._hits: Counter[str] = Counter()  # tokens, by tier
        self._now = self._pause_until = float("-inf")
        self.chunk_tokens = tier.blocks_per_chunk * kv.block_size

    # --- hooks of the engine core, apart from `before_plan` and `after_step`

    def wait(self) -> None:
        """Wait a moment for a chunk that is being loaded; return at once if there is none."""
        if self._loads:
            self.tier.wait()

    def when_idle(self, has_more: bool) -> bool:
        """Store chunks of the backlog. Returns True while chunks wait to be stored or are being stored."""
        if not (self._backlog or self.tier.is_storing):
            return has_more
        self.write_back(None)
        self.tier.wait()
        return True

    def has_news(self, num_steps: int) -> bool:
        return self.tier.has_news

    def report(self, events: EngineCoreOutputs, num_steps: int) -> None:
        """Add the tiers' stats since the last report, if they have changed."""
        events.stats.tiers = stats = self.tier.take_stats()
        if stats is not None and self._hits:
            for each in stats:
                each.hit_tokens = self._hits.pop(each.tier, 0)

    def close(self, is_healthy: bool) -> None:
        """Store the backlog of a healthy engine for at most `CLOSING_SECONDS`, and end the I/O."""
        if is_healthy:
            num_chunks, end = len(self._backlog), time.monotonic() + CLOSING_SECONDS
            self.write_back(None)
            while self._backlog and time.monotonic() < end:
                self.tier.wait()
                self.write_back(None)
            if self._backlog:
                logger.warning("%d of %d KV chunks were not stored before shutdown", len(self._backlog), num_chunks)
        self.tier.close()

    # --- loading

    def begin(self, request: Request, prefix: list[int]) -> bool:
        """Start to load the chunks that follow a waiting request's cached prefix, if the tier has them. A request joins
        a load in progress that starts with the same block. Return True if the request now waits for a load."""
        if request.asked_tiers or not request.reads_prefix_cache or self._now < self._pause_until:
            return False
        request.asked_tiers = True
        kv, size = self._kv, self.tier.blocks_per_chunk
        first = len(prefix) // kv.num_groups // size
        last = first
        while (last + 1) * size <= (request.num_tokens - 1) // kv.block_size and self.tier.find(
            kv.block_hash(request, (last + 1) * size - 1)
        ):
            last += 1
        if last == first or not self.tier.is_cheaper(self._seconds_of_chunk):
            return False
        hashes = request.block_hashes[first * size : last * size]
        contents = self._contents(hashes)
        for load in self._loads.values():
            if load.contents[0] == contents[0]:
                request.asked_tiers = False  # searched again after this load: its own chunks may go further
                return self._join(request, load)
        held = owned(prefix)
        kv.pool.share(held)
        firsts = [last * size - need for need in kv.needs(last * size)]
        is_seen = [place >= least for place in range(first * size, last * size) for least in firsts]
        if sum(is_seen) > kv.pool.num_free:  # no room to run either: searched again later
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
        """Return the keys of the blocks of these places in the hash index, grouped by place."""
        return [content + mark for content in hashes for mark in self._kv.marks]

    def _join(self, request: Request, load: Load) -> bool:
        request.load = load
        request.note(EventKind.LOADING, self._now, len(load.sources) * self.chunk_tokens)
        load.requests.append(request)
        return True

    def before_plan(self, now: float, is_busy: bool) -> None:
        """Take in the chunks loaded since the last step, and end loads that had none for `PATIENCE` seconds."""
        self._now = now
        for ticket, index, source in self.tier.poll(BUSY_SECONDS if is_busy else IDLE_SECONDS):
            load = self._loads[ticket]
            load.sources[index], load.news = source or "", now
            if None not in load.sources:
                self._finish(load, now)
        for load in [load for load in self._loads.values() if now - load.news > PATIENCE]:
            logger.warning("No KV block was loaded within %d s; loading is off for the next %d s", PATIENCE, PAUSE)
            self._pause_until = now + PAUSE
            self._finish(load, now)

    def _finish(self, load: Load, now: float) -> None:
        """End a load: publish the blocks of the chunks that continue the prefix without a gap."""
        size, pool = self.tier.blocks_per_chunk, self._kv.pool
        had = [source or "" for source in load.sources]
        num_chunks = had.index("") if "" in had else len(had)
        width = num_chunks * size * self._kv.num_groups
        for block_id, content in zip(load.block_ids[:width], load.contents, strict=False):
            if block_id != NO_BLOCK:
                pool.publish(block_id, content)
        names = load.contents[(size - 1) * self._kv.num_groups :: size * self._kv.num_groups]
        chunks = dict(zip(names, had[:num_chunks], strict=False))
        self.tier.touch(list(chunks))
        self._hits += self._tokens_by_tier(chunks.values())
        for request in load.requests:  # a request that joined the load may not share all of its chunks
            own = [chunks[name] for name in request.block_hashes if name in chunks]
            for source, number in self._tokens_by_tier(own).items():
                request.note(EventKind.LOADED_FROM_RAM if source == "ram" else EventKind.LOADED_FROM_DISK, now, number)
        self._drop(load)

    def _tokens_by_tier(self, sources: Iterable[str]) -> Counter[str]:
        """Return the tokens that each tier provided, given the tier of each chunk."""
        return Counter({tier: n * self.chunk_tokens for tier, n in Counter(sources).items()})

    def leave(self, request: Request) -> None:
        """Remove the request from its load, if it has one, and drop a load that has no requests left."""
        if (load := request.load) is not None:
            request.load = None
            load.requests.remove(request)
            if not load.requests:
                self._drop(load)

    def give_up(self) -> None:
        """Drop all loads, because a running request needs blocks. Requests that waited for them compute instead."""
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
        """Add to the backlog the chunks that the published blocks `start` .. `end` - 1 complete, and the chunks before
        them that the tier lacks. After a prompt's last chunk, add an entry that marks all as used."""
        if request.message.is_private or start == end:
            return
        kv, size = self._kv, self.tier.blocks_per_chunk
        for chunk in range(0 if start * kv.block_size == request.num_cached_tokens else start // size, end // size):
            stop = (chunk + 1) * size
            if self._only_prompts and stop * kv.block_size > request.num_prompt_tokens:
                break
            name = kv.block_hash(request, stop - 1)
            if len(self._backlog) >= MAX_BACKLOG:
                return
            if name not in self._backlog and not self.tier.find(name) and self.tier.is_cheaper(self._seconds_of_chunk):
                self._backlog[name] = self._contents(request.block_hashes[stop - size : stop])
        last = request.num_prompt_tokens // kv.block_size // size * size
        if start < last <= end:
            self._backlog[_USED + request.block_hashes[last - 1]] = request.block_hashes[size - 1 : last : size]

    def after_step(self, step: EndedStep) -> None:
        """Store part of the backlog."""
        if step.outcome is StepOutcome.DONE:
            self.write_back(step.seconds)

    def write_back(self, seconds: float | None) -> None:
        """Store part of the backlog after a step of `seconds`. None means an idle engine: no limit."""
        if seconds is not None:
            self._credit = min(self._credit + STORE_SHARE * seconds, MAX_CREDIT * self.tier.store_seconds)
        find = self._kv.pool.find
        while self._backlog and (seconds is None or self._credit >= 0):
            name, contents = next(iter(self._backlog.items()))
            if name.startswith(_USED):
                self.tier.touch(self._backlog.pop(name))
                continue
            block_ids = [block_id for content in contents if (block_id := find(content)) is not None]
            if len(block_ids) == len(contents):
                if not self.tier.store(name, block_ids):
                    return
                self._credit -= self.tier.store_seconds
            del self._backlog[name]

    def withdraw(self, request: Request) -> None:
        """Discard the stored chunks of a request that may have computed wrong contents, and drop all loads."""
        self.give_up()
        size = self.tier.blocks_per_chunk
        names = request.block_hashes[size - 1 :: size]
        for name in names:
            self._backlog.pop(name, None)
        self.tier.discard(names)

    def tables(self) -> list[list[int]]:
        """Return the blocks that each load holds, for checks of the block accounts."""
        return [load.prefix + owned(load.block_ids) for load in self._loads.values()]

    @property
    def _seconds_of_chunk(self) -> float:
        return self._pacing.table.seconds_per_prompt_token * self.chunk_tokens
