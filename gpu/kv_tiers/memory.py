"""Blocks copied out of the KV cache and into it, all layers at once. Called on the engine's thread, between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


def nothing_to_wait_for() -> None: ...


class KVMemory(Protocol):
    """The cache of a model: one array for each layer, [num_blocks, ...]."""

    block_bytes: int  # of one block over all layers

    def buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        """Memory to copy to and from: uint8 [num_bytes]."""
        ...

    def copy_out(self, block_ids: Sequence[int], into: NDArray[np.uint8]) -> Callable[[], None]:
        """Copy these blocks to [layers, blocks, bytes]. Returns what waits until they are there; the cache may be
        written by a later step before that."""
        ...

    def copy_in(self, block_ids: Sequence[int], data: NDArray[np.uint8]) -> Callable[[], None]:
        """The way back, before any later step; what has a negative id is left out. Returns what waits until `data` is
        not needed any more."""
        ...


class HostMemory:
    """Caches that are numpy's arrays."""

    def __init__(self, caches: Sequence[NDArray[Any]]) -> None:
        self._caches = [cache.reshape(len(cache), -1).view(np.uint8) for cache in caches]
        self._bytes = [cache.shape[1] for cache in self._caches]
        self.block_bytes = sum(self._bytes)

    def buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        return np.empty(num_bytes, np.uint8)

    def copy_out(self, block_ids: Sequence[int], into: NDArray[np.uint8]) -> Callable[[], None]:
        start = 0
        for cache, width in zip(self._caches, self._bytes, strict=True):
            for block_id in block_ids:
                into[start : start + width] = cache[block_id]
                start += width
        return nothing_to_wait_for

    def copy_in(self, block_ids: Sequence[int], data: NDArray[np.uint8]) -> Callable[[], None]:
        start = 0
        for cache, width in zip(self._caches, self._bytes, strict=True):
            for block_id in block_ids:
                if block_id >= 0:
                    cache[block_id] = data[start : start + width]
                start += width
        return nothing_to_wait_for


class TorchMemory:
    """Caches that are tensors. Copies are put on the current stream of their device, behind the steps in flight."""

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        import torch

        self._torch = torch
        self._caches = [cache.detach().flatten(1).view(torch.uint8) for cache in caches]
        self._on_cuda = caches[0].is_cuda
        self.block_bytes = sum(cache.shape[1] for cache in self._caches)

    def buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = self._torch.empty(
            num_bytes, dtype=self._torch.uint8, pin_memory=self._on_cuda
        ).numpy()
        return found

    def copy_out(self, block_ids: Sequence[int], into: NDArray[np.uint8]) -> Callable[[], None]:
        with self._torch.inference_mode():
            ids = self._ids(block_ids)
            gathered = self._torch.cat([cache.index_select(0, ids).flatten() for cache in self._caches])
            self._torch.from_numpy(into).copy_(gathered, non_blocking=True)
        return self._behind(gathered)

    def copy_in(self, block_ids: Sequence[int], data: NDArray[np.uint8]) -> Callable[[], None]:
        with self._torch.inference_mode():
            places = [place for place, block_id in enumerate(block_ids) if block_id >= 0]
            ids, wanted = self._ids([block_ids[place] for place in places]), self._ids(places)
            moved = self._torch.from_numpy(data).to(self._caches[0].device, non_blocking=True)
            parts = moved.split([len(block_ids) * cache.shape[1] for cache in self._caches])
            for cache, part in zip(self._caches, parts, strict=True):
                cache.index_copy_(0, ids, part.unflatten(0, (len(block_ids), -1)).index_select(0, wanted))
        return self._behind(moved)

    def _ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        # From pinned memory: a copy from other memory waits for all steps in flight.
        from gpu.device.upload import on_device

        return on_device(np.array(block_ids, np.int64), self._caches[0].device)

    def _behind(self, held: torch.Tensor) -> Callable[[], None]:
        """What waits for all that has been put on the stream so far."""
        if not self._on_cuda:
            return nothing_to_wait_for
        event = self._torch.cuda.Event()
        event.record()

        def wait() -> None:
            event.synchronize()

        return wait
