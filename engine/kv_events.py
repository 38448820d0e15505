"""What engines tell of their prefix caches to whoever chooses among them, and what tells one beginning of a prompt from
another there.

A prompt is cut into chunks of some KV blocks. The hash of a chunk covers every token up to its end, the tenant and the
salt, as a block's own hash does; but it is keyed with what all engines of a fleet share, it is 8 bytes short, and
there are a few times fewer of them. A collision costs a prefill, so that is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

MIN_CHUNK = 128  # tokens: a shared beginning shorter than this is not worth a detour
_encode = msgspec.msgpack.Encoder().encode  # the quickest way from a list of ints to bytes that tell it


def chunk_size(block_size: int) -> int:
    """Tokens of a chunk, where KV blocks have so many."""
    return -(-MIN_CHUNK // block_size) * block_size


class KVEvents(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """Which chunks of prompts can be found in an engine's prefix cache since it told before.

    `sequence` goes up by one with each that an engine sends; where one is missing, `PublishKVEvents` asks for all that
    there is. An engine has another `epoch` after a restart. Hashes are 8 bytes each, little-endian.
    """

    epoch: int
    sequence: int
    stored: bytes
    removed: bytes
    is_whole: bool = False  # these are all


class PrefixHashes:
    """The hashes of one sequence, chunk by chunk."""

    __slots__ = ("_hasher", "_size", "hashes", "key")

    def __init__(self, key: bytes, size: int, tenant: str, salt: str) -> None:
        """`key`: at most 64 bytes; `size`: tokens of a chunk."""
        self.key = key
        self.hashes: list[int] = []
        self._size = size
        self._hasher = blake2b(_encode((tenant, salt)), key=key, digest_size=8)

    def extend(self, token_ids: Sequence[int]) -> int:
        """Go on with the next chunk of the sequence, which has all of its tokens. About a microsecond."""
        start = len(self.hashes) * self._size
        self._hasher.update(_encode(token_ids[start : start + self._size]))
        found = int.from_bytes(self._hasher.digest(), "little")
        self.hashes.append(found)
        return found


def in_windows(chunk: int) -> int:
    """The other name of a chunk: of what KV groups with windows hold of it."""
    return chunk ^ (2**64 - 1)
