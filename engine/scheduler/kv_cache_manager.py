"""Allocation and sharing of blocks, and the events of the prefix cache.

1. A block's hash covers its own tokens, all tokens before it, the tenant, and the client's salt. It is BLAKE2b keyed
   with a secret of this process, or of the directory that blocks are kept in, so a collision cannot be computed from
   outside (vLLM's CVE-2025-25183) and no tenant can probe what another has sent (CVE-2025-46570).
2. If prefill and decode compute keys and values that differ in their last bits (`prompt_form_differs`), the hash also
   covers which of a block's tokens were generated. So the prompt of the next turn computes the tokens of the answer
   again, and the bits of a request's output do not depend on earlier requests.
3. A prefix is hit if every group of layers (`engine.plan`) has the blocks that the next token sees: all blocks of full
   groups, and the latest blocks of groups with a window. Blocks that have left the window are released at once, and can
   be found until they are allocated again. In a model with states, the prefix must also end with a checkpoint
   (`engine.scheduler.checkpoints`).
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterable
from hashlib import blake2b
from itertools import cycle
from typing import Any

from engine.commands import PublishKVEvents, ResetPrefixCache
from engine.kv_events import KVEvents, PrefixHashes, chunk_size, in_windows
from engine.messages import EngineCoreOutputs, ModelFacts
from engine.plan import NO_BLOCK, most_blocks, owned
from engine.scheduler.block_pool import BlockPool
from engine.scheduler.checkpoints import Checkpoints
from engine.scheduler.request import Request
from engine.scheduler.tiers import Tiers
from engine.snapshot import BlocksSnapshot

_DIGEST_SIZE = 16


class KVCacheManager:
    """Block tables of the scheduler's requests over one BlockPool. Owned by the Scheduler."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_step_tokens: int,
        facts: ModelFacts = ModelFacts(),  # noqa: B008 - frozen
        enable_prefix_caching: bool = True,
        checkpoint_interval: int = 1024,
        key: bytes | None = None,
    ) -> None:
        """Make the pool. Hashes are keyed with `key`; without one, with a secret of this process."""
        self.block_size = block_size
        windows = facts.kv_windows
        self.num_groups = len(windows)
        self._windows = windows
        self.max_step_tokens = max_step_tokens
        self._has_windows = any(window is not None for window in windows)
        # Appended to a block's hash: the same tokens have different content in each group. Empty for the first group.
        self.marks = [bytes([group] * (group > 0)) for group in range(self.num_groups)]
        marked = list(zip(windows, self.marks, strict=True))
        # The marks of groups without a window, and of groups with one.
        self.marks_by_kind = [
            (kind, [mark for window, mark in marked if (window is not None) is kind])
            for kind in dict.fromkeys(window is not None for window in windows)
        ]
        self.pool = BlockPool(num_blocks)
        self.checkpoints: Checkpoints | None = None
        if facts.state_bytes and enable_prefix_caching:
            sizes = (facts.num_checkpoints, facts.state_bytes, block_size, checkpoint_interval)
            self.checkpoints = Checkpoints(*sizes, self.block_hash)
        self.enable_prefix_caching = enable_prefix_caching
        self.facts = facts
        self.events: KVEventLog | None = None  # None unless a router has asked for events
        self.handles: dict[type, Callable[[Any], None]] = {
            PublishKVEvents: lambda command: self.publish_events(command.key),
            ResetPrefixCache: lambda command: self.reset(),
        }
        self.tiers: Tiers | None = None  # set by the scheduler
        self._key = key or secrets.token_bytes(32)
        self._hash = blake2b(key=self._key, digest_size=_DIGEST_SIZE)  # copied: a key takes as long as a block does

    @property
    def usage(self) -> float:
        """The share of the blocks that requests own, 0 .. 1."""
        return 1.0 - self.pool.num_free / self.pool.num_blocks

    def most_blocks(self, num_tokens: int) -> int:
        """Return how many blocks a request of this many tokens may own at a time, over all groups."""
        return most_blocks(self._windows, self.block_size, num_tokens, self.max_step_tokens)

    def publish_events(self, key: bytes) -> None:
        """Record changes of the prefix cache from now on, and report its whole content first."""
        if self.events is None or self.events.key != key:
            self.events = KVEventLog(self, key)
            self.pool.on_removed = self.events.remove
        self.events.tells_all = True

    def has_news(self, num_steps: int) -> bool:
        """Return True if there are changes of the prefix cache to send."""
        return self.events is not None and self.events.has_news

    def report(self, events: EngineCoreOutputs, num_steps: int) -> None:
        """Add the changes of the prefix cache since the last report, if a router asked for them."""
        if self.events is not None:
            events.kv_events = self.events.take()

    def find_prefix(self, request: Request) -> list[int]:
        """Return the block table of the longest cached prefix of the request's tokens. Takes no references.

        At least one token is left to compute: without it there would be no logits to sample from. Groups with a window
        need only the blocks that the next token sees.
        """
        if not (self.enable_prefix_caching and request.reads_prefix_cache):
            return []
        limit = (request.num_tokens - 1) // self.block_size
        if self._has_windows or self.num_groups > 1:
            return self._find_in_groups(request, limit)
        found: list[int] = []
        for index in range(limit):
            block_id = self.pool.find(self.block_hash(request, index))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def _find_in_groups(self, request: Request, limit: int) -> list[int]:
        # The cached blocks of each place, up to the first place where a group without a window lacks one.
        rows: list[list[int | None]] = []
        for index in range(limit):
            content = self.block_hash(request, index)
            row = [self.pool.find(content + mark) for mark in self.marks]
            if any(window is None and block_id is None for window, block_id in zip(self._windows, row, strict=True)):
                break
            rows.append(row)
        # If a window lacks a block, the prefix ends there, and the windows before the new end are searched.
        needs = self.needs(limit)
        length = index = len(rows)
        while index > max(0, length - max(needs)):
            index -= 1
            if any(
                block_id is None and index >= length - need for block_id, need in zip(rows[index], needs, strict=True)
            ):
                length = index
        return [
            NO_BLOCK if block_id is None or index < length - need else block_id
            for index, row in enumerate(rows[:length])
            for block_id, need in zip(row, needs, strict=True)
        ]

    def needs(self, num_places: int) -> list[int]:
        """Return for each group how many of the latest of `num_places` places the next token sees."""
        return [num_places if window is None else self._places(window - 1) for window in self._windows]

    def up_to_checkpoint(self, request: Request, prefix: list[int]) -> list[int]:
        """Return the part of a cached prefix from which the request can begin: in a model with states, up to the last
        checkpoint."""
        assert self.checkpoints is not None
        num_places = self.checkpoints.covered(request, len(prefix) // self.num_groups)
        return prefix[: num_places * self.num_groups]

    def can_admit(self, request: Request, prefix: list[int]) -> bool:
        """Return True if there are free blocks for all known tokens of the request, so its prefill will not run out of
        them.
        """
        shared = owned(prefix) if self._has_windows else prefix
        unowned = sum(1 for block_id in shared if self.pool.is_free(block_id))
        return self.most_blocks(request.num_tokens) - len(shared) + unowned <= self.pool.num_free

    def adopt_prefix(self, request: Request, prefix: list[int]) -> None:
        """Start the request's block table with the blocks that `find_prefix` returned."""
        self.pool.share(owned(prefix) if self._has_windows else prefix)
        request.block_ids = list(prefix)
        request.num_committed_blocks = len(prefix) // self.num_groups
        request.num_computed_tokens = request.room = request.num_committed_blocks * self.block_size
        if self.checkpoints is not None:
            request.checkpoint = self.checkpoints.begin(request, request.num_committed_blocks)

    def extend(self, request: Request, num_tokens: int) -> list[int] | None:
        """Make room for the request's first `num_tokens` tokens. Returns the blocks added, None if too few are free."""
        missing = self._places(num_tokens - request.room)
        if missing <= 0:
            return []
        if self._has_windows:
            self._leave_windows(request)
        if missing * self.num_groups > self.pool.num_free and self.tiers is not None:
            self.tiers.give_up()
        if missing * self.num_groups > self.pool.num_free:
            return None
        block_ids = self.pool.allocate(missing * self.num_groups)
        request.block_ids += block_ids
        request.room += missing * self.block_size
        return block_ids

    def commit(self, request: Request) -> None:
        """Publish the request's full, computed blocks, and release blocks that it does not need any more.

        Called after the step that computed them has succeeded: a failed step leaves no wrong block to be found.
        """
        full = request.num_computed_tokens // self.block_size
        if self.enable_prefix_caching:
            for index in range(request.num_committed_blocks, full):
                content = self.block_hash(request, index)
                for group, mark in enumerate(self.marks, index * self.num_groups):
                    self.pool.publish(request.block_ids[group], content + mark)
            if self.events is not None:
                self.events.note(request)
            if self.tiers is not None:
                self.tiers.note_published(request, request.num_committed_blocks, full)
        request.num_committed_blocks = max(full, request.num_committed_blocks)
        if self._has_windows:
            self._leave_windows(request)

    def _leave_windows(self, request: Request) -> None:
        """Release the blocks that neither the next token nor any later one sees. They can be found for a while.

        Other prompts may share this prompt, but hardly ever end within its answer. So released blocks of the answer are
        evicted first, unless a tier is to store them before.
        """
        end = len(request.block_ids)  # the end of the blocks that other requests may need
        if self.tiers is None or self.facts.prompt_form_differs:
            end = request.num_prompt_tokens // self.block_size * self.num_groups
        for group, window in enumerate(self._windows):
            if window is not None:
                left: list[int] = []
                answer: list[int] = []
                first = max(0, request.num_computed_tokens + 1 - window) // self.block_size
                for place in range((first - 1) * self.num_groups + group, -1, -self.num_groups):
                    if request.block_ids[place] == NO_BLOCK:
                        break
                    (left if place < end else answer).append(request.block_ids[place])
                    request.block_ids[place] = NO_BLOCK
                if left:
                    self.pool.release(left[::-1])
                if answer:
                    self.pool.release(answer[::-1], is_unlikely=True)

    def withdraw(self, request: Request) -> None:
        """Remove all blocks of the request from the index, because their contents may be wrong."""
        if self.enable_prefix_caching:
            for index in range(request.num_committed_blocks):
                content = self.block_hash(request, index)
                found = [self.pool.find(content + mark) for mark in self.marks]
                self.pool.withdraw(block_id for block_id in found if block_id is not None)
        if self.checkpoints is not None:
            self.checkpoints.withdraw(request)
        if self.tiers is not None:
            self.tiers.withdraw(request)

    def reset(self) -> None:
        """Clear the index of cached blocks. Chunks in tiers stay there."""
        if self.events is not None:
            self.events.clear()
        self.pool.withdraw(range(self.pool.num_blocks))
        if self.checkpoints is not None:
            self.checkpoints.reset()

    def free(self, request: Request) -> None:
        """Release everything the request owns. Published blocks can be found until they are overwritten."""
        if self.tiers is not None:
            self.tiers.leave(request)
        block_ids = owned(request.block_ids) if self._has_windows else request.block_ids
        if request.message.keeps_prefix:
            self.pool.keep(block_ids)
        self.pool.release(block_ids)
        request.block_ids = []
        request.room = 0
        request.num_committed_blocks = 0
        request.num_computed_tokens = 0

    def snapshot(self, requests: Iterable[Request]) -> BlocksSnapshot:
        """Return the state of all blocks. `requests` are the owners of blocks; their block tables give the group of
        each.
        """
        groups: dict[int, int] = {}
        if self.num_groups > 1:
            for request in requests:
                groups.update(zip(request.block_ids, cycle(range(self.num_groups))))
        return self.pool.snapshot(groups)

    def block_hash(self, request: Request, index: int) -> bytes:
        """Return the hash of the request's full block `index`, computed at the first call."""
        hashes = request.block_hashes
        while len(hashes) <= index:
            start = len(hashes) * self.block_size
            tokens = array("I", request.token_ids[start : start + self.block_size])
            parent = hashes[-1] if hashes else self._root(request)
            content = parent + tokens.tobytes()
            if self.facts.prompt_form_differs and start + self.block_size > request.num_prompt_tokens:
                content += max(request.num_prompt_tokens - start, 0).to_bytes(4, "big")
            content_hash = self._hash.copy()
            content_hash.update(content)
            hashes.append(content_hash.digest())
        return hashes[index]

    def _places(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _root(self, request: Request) -> bytes:
        # The length separates tenant and salt: ("ab", "c") and ("a", "bc") must differ.
        tenant, salt = request.tenant.encode(), request.message.cache_salt.encode()
        owner = len(tenant).to_bytes(4, "big") + tenant + salt
        return blake2b(owner, key=self._key, digest_size=_DIGEST_SIZE, person=b"tenant").digest()


# --------------------------------------------------------------------------------------------------------- kv event log
# The changes of the prefix cache, as chunks of blocks, for a router that chooses among several engines.
#
# A chunk is stored when all of its blocks can be found, and removed when one of them no longer can. In models with
# windows a chunk has two hashes: one for the groups that keep all tokens, and one (`in_windows`) for groups with
# windows, which lose blocks sooner. The log exists only after a `PublishKVEvents`. Owned by the KVCacheManager.


class KVEventLog:
    """The changes of the prefix cache since the last `take`, and all chunks in the cache. If `tells_all` is set, the
    next `take` returns all.

    Takes some 200 bytes for each chunk and 60 for each block.
    """

    def __init__(self, kv: KVCacheManager, key: bytes) -> None:
        self.key = key
        self.size = chunk_size(kv.block_size)
        self._kv = kv
        self._blocks: dict[int, tuple[int, ...]] = {}  # the block ids of each stored chunk
        self._chunks: list[tuple[int, ...]] = [()] * kv.pool.num_blocks  # of each block
        self._changes: dict[int, bool] = {}  # chunks stored (True) or removed (False) since `take`
        self._epoch = secrets.randbits(63)
        self._sequence = 0
        self.tells_all = True

    @property
    def has_news(self) -> bool:
        return self.tells_all or bool(self._changes)

    def note(self, request: Request) -> None:
        """Record newly published blocks of the request, and the chunks that they complete."""
        kv, size = self._kv, self.size
        known = request.prefix_hashes
        if known is None or known.key != self.key:
            known = request.prefix_hashes = PrefixHashes(self.key, size, request.tenant, request.message.cache_salt)
        end = request.num_computed_tokens
        if kv.facts.prompt_form_differs:  # then generated tokens match no other prompt
            end = min(end, request.num_prompt_tokens)
        # Blocks are published again after a preemption.
        start = min(len(known.hashes), request.num_committed_blocks * kv.block_size // size)
        for index in range(start, end // size):
            name = known.hashes[index] if index < len(known.hashes) else known.extend(request.token_ids)
            for is_windowed, marks in kv.marks_by_kind:
                chunk = in_windows(name) if is_windowed else name
                if chunk not in self._blocks:
                    self._store(chunk, request, index, marks)

    def _store(self, chunk: int, request: Request, index: int, marks: list[bytes]) -> None:
        kv = self._kv
        width = self.size // kv.block_size
        found: list[int] = []
        for place in range(index * width, (index + 1) * width):
            content = kv.block_hash(request, place)
            for mark in marks:
                block_id = kv.pool.find(content + mark)
                if block_id is None:
                    return
                found.append(block_id)
        self._blocks[chunk] = tuple(found)
        for block_id in found:
            self._chunks[block_id] += (chunk,)
        if self._changes.pop(chunk, True):
            self._changes[chunk] = True

    def remove(self, block_id: int) -> None:
        """Record that the content of this block cannot be found any more."""
        for chunk in self._chunks[block_id]:
            for other in self._blocks.pop(chunk):
                self._chunks[other] = tuple(each for each in self._chunks[other] if each != chunk)
            if not self._changes.pop(chunk, False):
                self._changes[chunk] = False

    def clear(self) -> None:
        """Record that nothing can be found any more."""
        for blocks in self._blocks.values():
            for block_id in blocks:
                self._chunks[block_id] = ()
        self._blocks.clear()
        self._changes.clear()
        self.tells_all = True

    def take(self) -> KVEvents | None:
        """Return the changes since the last call; None if there are none."""
        if not self.has_news:
            return None
        is_whole, self.tells_all = self.tells_all, False
        stored = list(self._blocks) if is_whole else [chunk for chunk, is_there in self._changes.items() if is_there]
        removed = [] if is_whole else [chunk for chunk, is_there in self._changes.items() if not is_there]
        self._changes.clear()
        self._sequence += 1
        return KVEvents(
            epoch=self._epoch,
            sequence=self._sequence,
            stored=array("Q", stored).tobytes(),
            removed=array("Q", removed).tobytes(),
            is_whole=is_whole,
        )
