"""Stores of chunks whose content is known by their number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpu.kv_tiers.chunks import HEADER_BYTES, Signer
from gpu.kv_tiers.stores import DiskStore, RamStore

SIZE = 4096 + 24
SECRET = b"s" * 32
SPACES = (b"m" * 16, b"n" * 16)


def payload(number: int, size: int = SIZE) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def open_store(folder: Path, *, max_chunks: int = 1000, secret: bytes = SECRET, space: bytes = b"n" * 16) -> DiskStore:
    return DiskStore(folder, Signer(secret, space, SIZE), max_chunks * (SIZE + HEADER_BYTES))


def loaded(store: DiskStore | RamStore, number: int) -> NDArray[np.uint8] | None:
    into = np.zeros(SIZE, np.uint8)
    return into if store.load(name(number), into) else None


def is_right(store: DiskStore | RamStore, number: int) -> bool:
    found = loaded(store, number)
    return found is not None and np.array_equal(found, payload(number))


def file_of(folder: Path, number: int) -> Path:
    return next(folder.glob(f"*/{name(number).hex()}.kv"))
