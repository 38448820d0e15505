"""Chunks as files of a directory, and in memory. The least recently used ones are evicted first.

    DIR/key                      32 secret bytes, mode 0600
    DIR/lock                     held while chunks are evicted (flock: the kernel releases it if the process dies)
    DIR/NAMESPACE/NAME.kv        a chunk; its time of modification is when it was last used
    DIR/NAMESPACE/*.tmp          a chunk that is being written, locked by its writer

1. A chunk gets its name when it is complete, so no reader sees half of one unless the machine crashed. Files are not
   synced for that case: a file that does not match its header is a miss, and is removed with a line in the log.
2. Other files in a namespace are left alone. Nothing is stored in or read from a folder that is a symbolic link.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import re
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.kv_tiers.chunks import HEADER_BYTES, Signer, read_key

logger = logging.getLogger(__name__)

PAUSE = 60.0  # seconds without writing, after a write has failed
SCAN_INTERVAL = 1.0  # seconds at least between two scans for chunks that other engines have written or removed
SCAN_SHARE = 0.01  # of a store's time at most is spent on scans
AT_A_STRETCH = 1000  # files read before other threads get the interpreter
SLACK = 0.05  # share of the limit that an eviction frees in addition, so that evictions are rare
_DRAFT = re.compile(r"[0-9a-f]{32}\.\d+\.\d+\.tmp")


class DiskStore:
    """The chunks of one namespace. `find` does no I/O and may be called by any thread; other methods block."""

    name = "disk"

    def __init__(
        self,
        directory: Path,
        signer: Signer,
        max_bytes: int,
        *,
        key: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`key` is what `read_key` returned. Raises OSError if the directory cannot be read; failed writes are
        logged."""
        self._root = directory
        self._directory = directory / signer.namespace.hex()
        self._signer = signer
        self._key = key
        self._max_bytes = max_bytes
        self._clock = clock
        self._entries: set[bytes] = set()
        self._lock = threading.Lock()  # for changes by threads that load
        self._total = 0  # bytes of all namespaces at the last scan, and bytes written since
        self._pause_until = 0.0
        self._seen: list[tuple[str, int, int]] = []
        self._next_scan = 0.0
        with suppress(OSError):
            self._make()
        self._scan_all()
        with suppress(OSError):
            self._make_room(0)  # the limit may have been higher

    @property
    def num_bytes(self) -> int:
        return self._total

    def find(self, name: bytes) -> bool:
        """Return True if this chunk existed at the last scan."""
        return name in self._entries

    def load(self, name: bytes, into: NDArray[np.uint8]) -> bool:
        """Read a chunk. Return True if it was there, whole and unchanged; else the content of `into` is undefined."""
        path = self._path(name)
        try:
            with self._opened() as folder:
                # O_NONBLOCK: opening a pipe would wait for a writer.
                descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            try:
                header = bytearray(HEADER_BYTES)
                size = os.fstat(descriptor).st_size
                if size != self._signer.chunk_bytes or os.readv(descriptor, [header, into.data]) != size:
                    return self._cannot_use(name, f"it has {size} bytes, not {self._signer.chunk_bytes}")
                if not self._signer.verify(name, bytes(header), into):
                    return self._cannot_use(name, "its content does not match its name or its checksum")
                with suppress(OSError):
                    _touch(descriptor)
                return True
            finally:
                os.close(descriptor)
        except FileNotFoundError:  # another engine has evicted it
            self._forget(name)
        except OSError as error:  # the file may be intact; a later store replaces it
            logger.warning("the chunk %s cannot be read: %s", path, error)
            self._forget(name)
        return False

    def store(self, name: bytes, payload: NDArray[np.uint8]) -> bool:
        """Write a chunk, and evict others for it. Return True if it is stored now. Never raises OSError."""
        if self.find(name):
            return True
        if self._clock() < self._pause_until or self._signer.chunk_bytes > self._max_bytes:
            return False
        try:
            try:
                if not self._make_room(self._signer.chunk_bytes):
                    return False
                self._write(name, payload)
            except (FileNotFoundError, BlockingIOError, IsADirectoryError):
                # The directory was emptied, or another engine removed the temporary file as that of a dead writer, or a
                # folder has the chunk's name.
                self._make()
                return False
        except OSError as error:
            self._pause_until = self._clock() + PAUSE
            logger.warning(
                "the KV cache directory %s cannot be written (%s); nothing is stored for %d s", self._root, error, PAUSE
            )
            return False
        self._entries.add(name)
        self._total += self._signer.chunk_bytes
        return True

    def touch(self, name: bytes) -> None:
        """Mark a chunk as used now, if it is there."""
        if name in self._entries:
            with suppress(OSError), self._opened() as folder:
                _touch(self._path(name).name, dir_fd=folder, follow_symlinks=False)

    def discard(self, name: bytes) -> None:
        self._forget(name)
        with suppress(OSError), self._opened() as folder:
            os.unlink(self._path(name).name, dir_fd=folder)

    def _forget(self, name: bytes) -> None:
        with self._lock:
            if name in self._entries:
                self._entries.remove(name)
                self._total -= self._signer.chunk_bytes

    def refresh(self) -> None:
        """Scan all namespaces if an engine has written or removed chunks, at most every `SCAN_INTERVAL` seconds."""
        if self._clock() >= self._next_scan:
            began = time.thread_time()
            with suppress(OSError):
                self._make()
                status = [(folder.name, folder.stat()) for folder in self._namespaces()]
                seen = [(name, each.st_mtime_ns, each.st_ino) for name, each in status]
                if seen != self._seen:
                    self._scan_all()
                    self._seen = seen
            self._next_scan = self._clock() + max(SCAN_INTERVAL, (time.thread_time() - began) / SCAN_SHARE)

    def _make(self) -> None:
        """Make the directory, its key and the namespace's folder if they are missing. Raises OSError."""
        if self._key is not None:
            if not (self._root / "key").exists():
                logger.warning("the KV cache directory %s was removed or emptied, and is made again", self._root)
                self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if read_key(self._root / "key", self._key) != self._key and self._pause_until != math.inf:
                self._pause_until = math.inf
                logger.warning("%s has another key now: nothing is stored until this engine starts again", self._root)
        self._directory.mkdir(mode=0o700, exist_ok=True)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Open the namespace's folder. Raises OSError if it is a symbolic link, which may lead to foreign files."""
        folder = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            yield folder
        finally:
            os.close(folder)

    def _namespaces(self) -> list[os.DirEntry[str]]:
        length = 2 * len(self._signer.namespace)
        with os.scandir(self._root) as found:
            return [each for each in found if len(each.name) == length and each.is_dir(follow_symlinks=False)]

    def _path(self, name: bytes) -> Path:
        return self._directory / f"{name.hex()}.kv"

    def _cannot_use(self, name: bytes, why: str) -> bool:
        logger.warning("the chunk %s cannot be used and is removed: %s", self._path(name), why)
        self.discard(name)
        return False

    def _write(self, name: bytes, payload: NDArray[np.uint8]) -> None:
        draft = f"{name.hex()}.{os.getpid()}.{threading.get_native_id()}.tmp"
        header = self._signer.header(name, payload)
        with self._opened() as folder:
            descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600, dir_fd=folder)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.writev(descriptor, [header, payload.data]) != self._signer.chunk_bytes:
                    raise OSError("it is full")
                _touch(descriptor)
                os.rename(draft, self._path(name).name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(draft, dir_fd=folder)
                raise
            finally:
                os.close(descriptor)

    def _make_room(self, num_bytes: int) -> bool:
        """Evict chunks of any namespace until `num_bytes` fit. Return False while another engine is evicting."""
        if self._total + num_bytes <= self._max_bytes:
            return True
        with open(os.open(self._root / "lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600), "wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            for _, size, path in sorted(self._scan_all()):
                if self._total + num_bytes <= self._max_bytes * (1 - SLACK):
                    break
                with suppress(FileNotFoundError):
                    os.unlink(path)
                self._total -= size
                folder, file_name = os.path.split(path)
                if folder == str(self._directory) and (name := _name_of(file_name)) is not None:
                    self._entries.discard(name)
        return self._total + num_bytes <= self._max_bytes

    def _scan_all(self) -> list[tuple[int, int, str]]:
        """Return time of last use, size and path of all namespaces' chunks. Removes temporary files of dead writers.

        A time in the future counts as 0, because the clock was set back; a file larger than the limit gets 0, too.
        """
        found: list[tuple[int, int, str]] = []
        names: set[bytes] = set()
        now = time.time_ns()
        for folder in self._namespaces():
            with suppress(OSError):
                for number, file in enumerate(os.scandir(folder.path), 1):
                    if number % AT_A_STRETCH == 0:
                        time.sleep(0.001)
                    if _DRAFT.fullmatch(file.name):
                        _remove_if_left(file.path)
                    elif (name := _name_of(file.name)) is not None:
                        with suppress(FileNotFoundError):
                            status = file.stat(follow_symlinks=False)
                            if not stat.S_ISREG(status.st_mode):
                                continue
                            is_wrong = status.st_mtime_ns > now or status.st_size > self._max_bytes
                            found.append((0 if is_wrong else status.st_mtime_ns, status.st_size, file.path))
                            if folder.name == self._directory.name:
                                names.add(name)
        self._entries |= names
        self._entries &= names
        self._total = sum(size for _, size, _ in found)
        return found


def _name_of(file_name: str) -> bytes | None:
    """Return the name of the chunk in a file; None for any other file."""
    stem, _, suffix = file_name.partition(".")
    if suffix != "kv" or len(stem) != 32:
        return None
    with suppress(ValueError):
        return bytes.fromhex(stem)
    return None


def _touch(file: int | str, **where: Any) -> None:
    """Set a file's times to now, more exactly than the kernel would."""
    now = time.time_ns()
    os.utime(file, ns=(now, now), **where)


def _remove_if_left(path: str) -> None:
    """Remove an unlocked temporary file: its writer died."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(descriptor)


# ------------------------------------------------------------------------------------------------------------------ ram


class RamStore:
    """Chunks in the host's memory, for a device with memory of its own. Lost with the process.

    Its methods are those of `DiskStore`. A stored array is never written to again, since other threads may read it.
    """

    name = "ram"

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, NDArray[np.uint8]] = OrderedDict()  # the least recently used first
        self._lock = threading.Lock()
        self.num_bytes = 0

    def find(self, name: bytes) -> bool:
        return name in self._entries

    def load(self, name: bytes, into: NDArray[np.uint8]) -> bool:
        with self._lock:
            payload = self._entries.get(name)
            if payload is None:
                return False
            self._entries.move_to_end(name)
        np.copyto(into, payload)
        return True

    def store(self, name: bytes, payload: NDArray[np.uint8]) -> bool:
        if len(payload) > self._max_bytes:
            return False
        with self._lock:
            if name not in self._entries:
                while self.num_bytes + len(payload) > self._max_bytes:
                    _, evicted = self._entries.popitem(last=False)
                    self.num_bytes -= len(evicted)
                self._entries[name] = payload.copy()
                self.num_bytes += len(payload)
        return True

    def touch(self, name: bytes) -> None:
        with self._lock:
            if name in self._entries:
                self._entries.move_to_end(name)

    def discard(self, name: bytes) -> None:
        with self._lock:
            if (payload := self._entries.pop(name, None)) is not None:
                self.num_bytes -= len(payload)

    def refresh(self) -> None: ...
