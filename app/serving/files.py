"""Clients' files and batches on disk: contents in files of their own, objects in an SQLite database.

1. A tenant finds only its own objects. Names on the disk are ids that the server made.
2. Several servers may share the folder, for example during an update. One of them runs the batches.
3. A file's content is complete on the disk before its object is added. `sweep` deletes old uploads of killed servers.
4. All functions block: they are called on threads.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from app.config.settings import Settings, SettingsError
from protocol.answers import encode
from protocol.errors import ApiError, shown
from protocol.openai.batches import BATCH_WINDOW, Batch, BatchRequest, FileObject

_SCHEMA = """
CREATE TABLE IF NOT EXISTS objects (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL, kind TEXT NOT NULL,
    purpose TEXT, bytes INTEGER NOT NULL, expires INTEGER NOT NULL,
    input TEXT, -- of a batch that has not ended: the id of its file
    cancelled INTEGER, -- the time at which a client has cancelled the batch
    body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS of_tenant ON objects (tenant, kind, number);
"""
_ADD = """
INSERT OR IGNORE INTO objects (id, tenant, kind, purpose, bytes, expires, input, body)
VALUES (:id, :tenant, :kind, :purpose, :bytes, :expires, :input, :body)
"""
MAX_ACTIVE = 100  # batches of a tenant that have not ended
_LEFT_OVER = 24 * 3600  # seconds after which an upload that was not finished counts as left by a killed process
_decode_batch = msgspec.json.Decoder(Batch).decode


def append_to(path: Path) -> BinaryIO:
    """Open a file, which only this user may read, for appending."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


class Upload:
    """A file that is being uploaded. It is written to the disk as it arrives; `num_bytes` have been written."""

    def __init__(self, store: FileStore, tenant: str) -> None:
        self.num_bytes = 0
        self.path = store.folder / f"upload-{uuid.uuid4().hex}"
        self._store, self._tenant = store, tenant
        self._file = append_to(self.path)

    def write(self, data: bytes) -> None:
        """Append `data`. Raises ApiError 413 above `max_file_bytes`, and 400 above `files_bytes_per_tenant`."""
        self.num_bytes += len(data)
        self._store.arriving[self._tenant] += len(data)
        self._store.check_room(self._tenant, self.num_bytes)
        self._file.write(data)

    def keep(self, filename: str, seconds: int | None) -> FileObject:
        """Make the upload a file of its tenant that expires after `seconds`; None: after `files_max_age`."""
        self._file.flush()
        os.fsync(self._file.fileno())
        file_id = f"file-{uuid.uuid4().hex}"
        self.path.rename(self._store.path(file_id))
        return self._store.add_file(self._tenant, file_id, filename, "batch", seconds)

    def close(self) -> None:
        """Delete the uploaded file unless `keep` was called."""
        self._store.arriving[self._tenant] -= self.num_bytes
        self._file.close()
        self.path.unlink(missing_ok=True)


class FileStore:
    """The files and batches of all tenants."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder
        self._settings = settings
        self._lock = threading.Lock()
        self.arriving: Counter[str] = Counter()  # bytes of uploads, by tenant
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._owner = append_to(folder / "owner")
            (folder / "index.db").touch(0o600)
            self._db = sqlite3.connect(folder / "index.db", isolation_level=None, check_same_thread=False, timeout=30)
            self._db.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise SettingsError(f"files_dir: cannot use {folder}: {error}. What works: a writable folder") from None

    def path(self, file_id: str) -> Path:
        return self.folder / file_id

    def becomes_owner(self) -> bool:
        """Try to take the folder's lock. Return True if this process has it: it runs the batches until it ends."""
        try:
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _run(self, statement: str, **values: Any) -> list[Any]:
        with self._lock:
            return self._db.execute(statement, values | {"now": int(time.time())}).fetchall()

    # --- files

    def room(self, tenant: str) -> int:
        """Return how many more bytes this tenant may store; negative if it has too many."""
        sizes = "SELECT coalesce(sum(max(bytes, 4096)), 0) FROM objects WHERE tenant = :tenant"  # empty ones count, too
        [(used,)] = self._run(sizes, tenant=tenant)
        return int(self._settings.files_bytes_per_tenant) - int(used) - self.arriving[tenant]

    def check_room(self, tenant: str, num_bytes: int) -> None:
        """Raise ApiError 413 if `num_bytes` exceeds `max_file_bytes`, and 400 if the tenant has too many bytes."""
        if num_bytes > (most := self._settings.max_file_bytes):
            raise ApiError(413, f"The file has more than {most} bytes (max_file_bytes). Split it.", param="file")
        if (room := self.room(tenant)) < 0:
            most = self._settings.files_bytes_per_tenant
            raise ApiError(
                400,
                f"Your files would have {most - room} bytes together; allowed are {most} (files_bytes_per_tenant). "
                "Delete files that you no longer need.",
                param="file",
                code="storage_full",
            )

    def add_file(
        self, tenant: str, file_id: str, filename: str, purpose: Any, seconds: int | None = None
    ) -> FileObject:
        """Add a file after its content is on the disk. Idempotent."""
        now = int(time.time())
        file = FileObject(
            id=file_id,
            bytes=self.path(file_id).stat().st_size,
            created_at=now,
            expires_at=now + min(seconds or self._settings.files_max_age, self._settings.files_max_age),
            filename=filename,
            purpose=purpose,
        )
        what: dict[str, Any] = {"kind": "file", "purpose": purpose, "bytes": file.bytes, "input": None}
        self._run(_ADD, id=file_id, tenant=tenant, expires=file.expires_at, body=encode(file), **what)
        return file

    def find(self, tenant: str, kind: str, object_id: str, param: str = "id") -> bytes:
        """Return an object of this tenant as JSON. Raises ApiError 404."""
        select = (
            "SELECT body, cancelled FROM objects WHERE id = :id AND tenant = :tenant AND kind = :kind "
            "AND (expires > :now OR input IS NOT NULL)"
        )
        if not (found := self._run(select, id=object_id, tenant=tenant, kind=kind)):
            words = f"There is no {kind} {shown(object_id)} here: it was never made, or is expired or deleted."
            raise ApiError(404, words, param=param, code="not_found")
        return _shown(kind, *found[0])

    def page(
        self, tenant: str, kind: str, *, after: str | None, limit: int, order: str, purpose: str | None = None
    ) -> tuple[list[bytes], bool]:
        """Return objects of this tenant as JSON, and whether there are more. Raises ApiError 404 for an unknown
        `after`."""
        if after is not None:
            self.find(tenant, kind, after, "after")
        select = (
            "SELECT body, cancelled FROM objects WHERE tenant = :tenant AND kind = :kind AND expires > :now "
            "AND (:purpose IS NULL OR purpose = :purpose) "
            "AND (:after IS NULL OR number * :sign > (SELECT number FROM objects WHERE id = :after) * :sign) "
            "ORDER BY number * :sign LIMIT :limit"
        )
        owned = {"tenant": tenant, "kind": kind, "purpose": purpose}
        found = self._run(select, **owned, after=after, limit=limit + 1, sign=1 if order == "asc" else -1)
        return [_shown(kind, *each) for each in found[:limit]], len(found) > limit

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file. Raises ApiError 404, and 409 while a batch reads it."""
        self.find(tenant, "file", file_id)
        if readers := self._run("SELECT id FROM objects WHERE input = :id", id=file_id):
            raise ApiError(409, f"The batch {readers[0][0]} reads this file. Wait, or cancel it.", code="file_in_use")
        self._run("DELETE FROM objects WHERE id = :id", id=file_id)
        self.path(file_id).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Delete expired files and batches, and old uploads that were not finished."""
        gone = self._run(
            "DELETE FROM objects WHERE expires <= :now AND input IS NULL "
            "AND id NOT IN (SELECT input FROM objects WHERE input IS NOT NULL) RETURNING id"
        )
        for (object_id,) in gone:
            self.path(object_id).unlink(missing_ok=True)
        for left in self.folder.glob("upload-*"):
            if left.stat().st_mtime < time.time() - _LEFT_OVER:
                left.unlink(missing_ok=True)

    # --- batches

    def add_batch(self, tenant: str, request: BatchRequest) -> bytes:
        """Add a batch, to be checked and run, and return it as JSON. Raises ApiError 404 for an unknown file, 400 for
        a file that is not for batches, and 429 for too many batches."""
        file = msgspec.json.decode(self.find(tenant, "file", request.input_file_id, "input_file_id"), type=FileObject)
        if file.purpose != "batch":
            raise ApiError(400, f"input_file_id must be a batch file; got {file.purpose}.", param="input_file_id")
        self.check_room(tenant, 0)
        of_tenant = "SELECT count(*) FROM objects WHERE tenant = :tenant AND input IS NOT NULL"
        if self._run(of_tenant, tenant=tenant)[0][0] >= MAX_ACTIVE:
            words = f"You have {MAX_ACTIVE} batches that have not ended. Wait for one, or cancel one."
            raise ApiError(429, words, code="too_many_batches", headers={"x-should-retry": "false"})
        now = int(time.time())
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=request.endpoint,
            input_file_id=file.id,
            created_at=now,
            expires_at=now + BATCH_WINDOW,
            metadata=request.metadata,
            output_expires_after=None if (age := request.output_expires_after) is None else age.seconds,
        )
        what: dict[str, Any] = {"kind": "batch", "purpose": None, "bytes": 0, "input": file.id}
        expires = batch.expires_at + self._settings.files_max_age
        self._run(_ADD, id=batch.id, tenant=tenant, expires=expires, body=encode(batch), **what)
        return encode(batch)

    def cancel(self, tenant: str, batch_id: str) -> bytes:
        """Mark a batch as cancelled. Raises ApiError 404, and 409 if it has ended."""
        batch = _decode_batch(self.find(tenant, "batch", batch_id))
        if batch.is_over:
            raise ApiError(409, f"The batch has ended (status {batch.status}): nothing to cancel.", code="batch_ended")
        self._run("UPDATE objects SET cancelled = :now WHERE id = :id AND cancelled IS NULL", id=batch_id)
        return self.find(tenant, "batch", batch_id)

    def active(self) -> list[tuple[str, Batch, bool]]:
        """Return the batches that have not ended, oldest first: the tenant, the batch, whether it is cancelled."""
        found = self._run("SELECT tenant, body, cancelled FROM objects WHERE input IS NOT NULL ORDER BY number")
        return [
            (tenant, _decode_batch(_shown("batch", body, cancelled)), cancelled is not None)
            for tenant, body, cancelled in found
        ]

    def save(self, batch: Batch) -> None:
        self._run(
            "UPDATE objects SET body = :body, input = :input WHERE id = :id",
            id=batch.id,
            body=encode(batch),
            input=None if batch.is_over else batch.input_file_id,
        )


def _shown(kind: str, body: bytes, cancelled: int | None) -> bytes:
    """Return an object as clients see it: a batch is cancelling until the server that runs it has ended it."""
    if kind != "batch" or cancelled is None:
        return body
    batch = _decode_batch(body)
    batch.cancelling_at = cancelled
    if not batch.is_over:
        batch.status = "cancelling"
    return encode(batch)
