"""Events of prefix caches for the router, and the hashes that identify prompt prefixes in these events.

A prompt is cut into chunks of one or several KV blocks. The hash of a chunk covers all tokens up to its end, the tenant
and the salt, as the hash of a block does. But its key is shared by all engines of a server, and it has only 8 bytes,
because a collision costs no more than a prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

MIN_CHUNK = 128  # tokens: a shorter shared prefix is not worth a longer queue
_encode = msgspec.msgpack.Encoder().encode  # the fastest encoding of a list of ints as bytes


def chunk_size(block_size: int) -> int:
    """Return the number of tokens in a chunk for this number of tokens in a KV block."""
    return -(-MIN_CHUNK // block_size) * block_size


class KVEvents(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """The chunks that came into and left an engine's prefix cache since its previous message.

    `sequence` increases by one with each message of an engine; after a lost message, `PublishKVEvents` asks for the
    whole cache. An engine has a new `epoch` after a restart. Hashes are 8 bytes each, little-endian.
    """

    epoch: int
    sequence: int
    stored: bytes
    removed: bytes
    is_whole: bool = False  # `stored` has all chunks of the cache


class PrefixHashes:
    """The hashes of the chunks of one sequence."""

    __slots__ = ("_hasher", "_size", "hashes", "key")

    def __init__(self, key: bytes, size: int, tenant: str, salt: str) -> None:
        """Start with no chunk. `key` has at most 64 bytes; `size` is the number of tokens in a chunk."""
        self.key = key
        self.hashes: list[int] = []
        self._size = size
        self._hasher = blake2b(_encode((tenant, salt)), key=key, digest_size=8)

    def extend(self, token_ids: Sequence[int]) -> int:
        """Add the next chunk of the sequence, which must be complete, and return its hash. About a microsecond."""
        start = len(self.hashes) * self._size
        self._hasher.update(_encode(token_ids[start : start + self._size]))
        found = int.from_bytes(self._hasher.digest(), "little")
        self.hashes.append(found)
        return found


def in_windows(chunk: int) -> int:
    """Return the hash that identifies the chunk's blocks in KV groups with windows."""
    return chunk ^ (2**64 - 1)
