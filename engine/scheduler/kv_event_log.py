"""What of the prefix cache is told to whoever chooses among several engines: chunks of blocks, as they come and go.

A chunk is told as stored when every block of it can be found, and as removed when one of them cannot any more. In
models with windows a chunk has two names: one for the groups that keep all tokens, one (`in_windows`) for those that do
not, whose blocks go sooner. Nothing is kept or computed until somebody has asked with `PublishKVEvents`. Owned by the
KVCacheManager, on the engine's thread.
"""

from __future__ import annotations

import secrets
from array import array
from typing import TYPE_CHECKING

from engine.kv_events import KVEvents, PrefixHashes, chunk_size, in_windows
from engine.scheduler.request import Request

if TYPE_CHECKING:
    from engine.scheduler.kv_cache_manager import KVCacheManager


class KVEventLog:
    """What has changed since it was taken before, and all that there is. With `tells_all` it tells that next.

    Takes some 200 bytes for each chunk and 60 for each block.
    """

    def __init__(self, kv: KVCacheManager, key: bytes) -> None:
        self.key = key
        self.size = chunk_size(kv.block_size)
        self._kv = kv
        self._blocks: dict[int, tuple[int, ...]] = {}  # of each chunk that is there
        self._chunks: list[tuple[int, ...]] = [()] * kv.pool.num_blocks  # of each block
        self._changes: dict[int, bool] = {}  # chunks that were stored (True) or removed since
        self._epoch = secrets.randbits(63)
        self._sequence = 0
        self.tells_all = True

    @property
    def has_news(self) -> bool:
        return self.tells_all or bool(self._changes)

    def note(self, request: Request) -> None:
        """Blocks of the request were published: chunks of it may have become whole."""
        kv, size = self._kv, self.size
        known = request.prefix_hashes
        if known is None or known.key != self.key:
            known = request.prefix_hashes = PrefixHashes(self.key, size, request.tenant, request.cache_salt)
        end = request.num_computed_tokens
        if kv.prompt_form_differs:  # what was generated is nobody's prompt
            end = min(end, request.num_prompt_tokens)
        start = min(len(known.hashes), request.num_committed_blocks * kv.block_size // size)  # again, if preempted
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
        """What this block holds cannot be found any more."""
        for chunk in self._chunks[block_id]:
            for other in self._blocks.pop(chunk):
                self._chunks[other] = tuple(each for each in self._chunks[other] if each != chunk)
            if not self._changes.pop(chunk, False):
                self._changes[chunk] = False

    def clear(self) -> None:
        """Nothing can be found any more."""
        for blocks in self._blocks.values():
            for block_id in blocks:
                self._chunks[block_id] = ()
        self._blocks.clear()
        self._changes.clear()
        self.tells_all = True

    def take(self) -> KVEvents | None:
        """What has changed since this was asked before; None if nothing has."""
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
