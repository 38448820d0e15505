"""The files of a page, as a browser gets them: with their types, a digest to ask again by, and nothing from elsewhere.

They are read once, when the first is asked for. A browser asks whether a file has changed (`ETag`), so that the files
of two versions are never mixed.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from anyio import to_thread

from app.scope import RequestScope
from protocol.errors import ApiError

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
SAME_ORIGIN = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class _File(NamedTuple):
    content: bytes
    compressed: bytes
    content_type: str
    digest: str


class PageFiles:
    """`read` gives the page's files by name; they are called on a thread, once."""

    def __init__(self, read: Callable[[], Mapping[str, bytes]], policy: str = SAME_ORIGIN) -> None:
        self._read = read
        self._files: dict[str, _File] | None = None
        self._headers = {
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
            "vary": "accept-encoding",
        }

    async def send(self, request: RequestScope, name: str) -> None:
        """Answer with a file, or 304 where the browser has it. Raises ApiError 404."""
        if self._files is None:
            self._files = await to_thread.run_sync(self._load)
        if (file := self._files.get(name)) is None:
            raise ApiError(404, f"There is nothing at {request.path[:200]!r}.")
        headers = self._headers | {"etag": file.digest}
        if request.headers.get("if-none-match") == file.digest:
            await request.send_body(304, b"", file.content_type, headers)
        elif "gzip" in request.headers.get("accept-encoding", ""):
            await request.send_body(200, file.compressed, file.content_type, headers | {"content-encoding": "gzip"})
        else:
            await request.send_body(200, file.content, file.content_type, headers)

    def _load(self) -> dict[str, _File]:
        return {
            name: _File(
                content,
                gzip.compress(content, mtime=0),
                TYPES[Path(name).suffix],
                f'"{hashlib.sha256(content).hexdigest()[:32]}"',
            )
            for name, content in self._read().items()
        }


def read_folder(folder: Path) -> dict[str, bytes]:
    """The files that a page is made of."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in TYPES}
