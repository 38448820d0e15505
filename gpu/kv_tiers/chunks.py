"""A chunk of keys and values: its header, its signature, and its copies into and out of the KV cache.

    0    8  magic
    8   16  namespace: weights, library that computes, layout of a block
    24  16  name: the hash of the chunk's last block, chained over all tokens before it and the tenant
    40   8  bytes of the payload
    48   8  not used: zeros; earlier versions wrote a number
    56  16  checksum of the payload
    72  16  keyed BLAKE2b of the fields above
    88      zeros up to 128, then the payload

Numbers are little-endian. The secret keys (not K/V) come from a file in the same directory, so a directory that was
copied without its key file has only misses.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b, shake_128
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


HEADER_BYTES = 128
_MAGIC = b"HRKV\x00\x01\r\n"
_FIELDS = struct.Struct("<8s16s16sQ8x16s")
_MAC_BYTES = 16


class Checksum:
    """A checksum of up to `num_bytes` bytes: sums of products with secret odd numbers modulo 2**64. It is several times
    as fast as CRC-32 or BLAKE2b are in Python.

    A change of one word is always found, because its factor has an inverse. A change of several words, or a part in
    the wrong place, is missed with a probability of about 2**-32: sums are weak in their highest bits, so a second sum
    covers the same bytes shifted by half a word, where those bits are lower.
    """

    def __init__(self, secret: bytes, num_bytes: int) -> None:
        size = -(-num_bytes // 8) * 8
        drawn = np.frombuffer(shake_128(secret).digest(2 * size), np.uint64).reshape(2, -1)
        self._factors = drawn | np.uint64(1)

    def of(self, data: NDArray[np.uint8]) -> bytes:
        """Return the checksum of some bytes, 16 bytes."""
        whole = len(data) // 8
        shifted = (len(data) - 4) // 8 if len(data) >= 4 else 0
        sums = (
            np.dot(data[: whole * 8].view(np.uint64), self._factors[0, :whole]),
            np.dot(data[4 : 4 + shifted * 8].view(np.uint64), self._factors[1, :shifted]),
        )
        ends = data[:4].tobytes() + data[whole * 8 :].tobytes() + len(data).to_bytes(8, "little")
        return blake2b(b"".join(int(each).to_bytes(8, "little") for each in sums) + ends, digest_size=16).digest()

    def of_files(self, paths: Iterable[Path]) -> bytes:
        """Return the checksum of every byte of some files, 16 bytes."""
        found = blake2b(digest_size=16)
        buffer = np.empty(len(self._factors[0]) * 8, np.uint8)
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer.data):
                    found.update(self.of(buffer[:count]))
            found.update(b"end")
        return found.digest()


class Signer:
    """Makes and checks the headers of one namespace's chunks. Immutable, so thread-safe."""

    def __init__(self, secret: bytes, namespace: bytes, payload_bytes: int) -> None:
        self.namespace = namespace
        self.payload_bytes = payload_bytes
        self.chunk_bytes = HEADER_BYTES + payload_bytes
        self._secret = blake2b(secret, person=b"piece").digest()
        self._checksum = Checksum(self._secret, payload_bytes)

    def header(self, name: bytes, payload: NDArray[np.uint8]) -> bytes:
        fields = _FIELDS.pack(_MAGIC, self.namespace, name, len(payload), self._checksum.of(payload))
        return (fields + self._mac(fields)).ljust(HEADER_BYTES, b"\0")

    def verify(self, name: bytes, header: bytes, payload: NDArray[np.uint8]) -> bool:
        """Return True if this is the chunk of that name, whole and unchanged."""
        fields = header[: _FIELDS.size]
        if header != (fields + self._mac(fields)).ljust(HEADER_BYTES, b"\0"):
            return False
        magic, namespace, found, size, checksum = _FIELDS.unpack(fields)
        if (magic, namespace, found, size) != (_MAGIC, self.namespace, name, len(payload)):
            return False
        return bool(checksum == self._checksum.of(payload))

    def _mac(self, fields: bytes) -> bytes:
        return blake2b(fields, key=self._secret, digest_size=_MAC_BYTES).digest()


def read_key(path: Path, first: bytes | None = None) -> bytes:
    """Return the 32 secret bytes of a directory, from its key file. If there is none, write `first`, or random bytes.
    Raises OSError, also for a file that other users can read."""
    try:
        return _read_key(path)
    except FileNotFoundError:
        draft = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
        try:
            descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with open(descriptor, "wb") as file:
                file.write(first or os.urandom(32))
            with suppress(FileExistsError):  # engines that start together all use the first one's key
                os.link(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    return _read_key(path)


def _read_key(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to another user; all engines of a directory must run as one user")
        if status.st_mode & 0o077:
            raise PermissionError(f"{path} must be readable by its owner alone; run chmod 600 on it")
        key = file.read(33)
    if len(key) != 32:
        raise OSError(f"{path} must have 32 bytes; if you remove it, chunks stored so far are never used again")
    return key


# --------------------------------------------------------------------------------------------------------------- memory
# Copies of blocks out of the KV cache and into it, all layers at once. Called on the engine's thread, between steps.


def nothing_to_wait_for() -> None: ...


class KVMemory(Protocol):
    """The KV cache of a model: one array for each layer, [num_blocks, ...]."""

    block_bytes: int  # bytes of one block over all layers

    def buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        """Allocate memory to copy to and from: uint8 [num_bytes]."""

    def copy_out(self, block_ids: Sequence[int], into: NDArray[np.uint8]) -> Callable[[], None]:
        """Copy these blocks to [layers, blocks, bytes]. Return a function that waits until the copy is complete; later
        steps may write to the cache before that."""

    def copy_in(self, block_ids: Sequence[int], data: NDArray[np.uint8]) -> Callable[[], None]:
        """Copy `data` to these blocks before any later step; negative ids are skipped. Return a function that waits
        until `data` may be changed."""


class HostMemory:
    """A `KVMemory` over numpy arrays."""

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
    """A `KVMemory` over tensors. It copies on their device's current stream, after the steps in flight."""

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        import torch

        self._torch = torch
        self._caches = [cache.detach().flatten(1).view(torch.uint8) for cache in caches]
        self._on_cuda = caches[0].is_cuda
        self.block_bytes = sum(cache.shape[1] for cache in self._caches)

    def buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        buffer = self._torch.empty(num_bytes, dtype=self._torch.uint8, pin_memory=self._on_cuda)
        return cast("NDArray[np.uint8]", buffer.numpy())

    def copy_out(self, block_ids: Sequence[int], into: NDArray[np.uint8]) -> Callable[[], None]:
        with self._torch.inference_mode():
            ids = self._ids(block_ids)
            gathered = self._torch.cat([cache.index_select(0, ids).flatten() for cache in self._caches])
            self._torch.from_numpy(into).copy_(gathered, non_blocking=True)
        return self._behind()

    def copy_in(self, block_ids: Sequence[int], data: NDArray[np.uint8]) -> Callable[[], None]:
        with self._torch.inference_mode():
            places = [place for place, block_id in enumerate(block_ids) if block_id >= 0]
            ids, wanted = self._ids([block_ids[place] for place in places]), self._ids(places)
            moved = self._torch.from_numpy(data).to(self._caches[0].device, non_blocking=True)
            parts = moved.split([len(block_ids) * cache.shape[1] for cache in self._caches])
            for cache, part in zip(self._caches, parts, strict=True):
                cache.index_copy_(0, ids, part.unflatten(0, (len(block_ids), -1)).index_select(0, wanted))
        return self._behind()

    def _ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        # From pinned memory: a copy from other memory waits for all steps in flight.
        from gpu.device.tables import on_device

        return on_device(np.array(block_ids, np.int64), self._caches[0].device)

    def _behind(self) -> Callable[[], None]:
        """Return a function that waits for all work put on the stream so far."""
        if not self._on_cuda:
            return nothing_to_wait_for
        event = self._torch.cuda.Event()
        event.record()
        return event.synchronize
