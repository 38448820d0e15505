"""A Hugging Face hub of this machine: file lists, revisions, large files behind a redirect, and every way to fail."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Self

import huggingface_hub.constants
import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL = 1000  # bytes; larger files are "large files" of the hub, with a sha256


class Request(NamedTuple):
    """One request as the hub saw it."""

    method: str
    path: str
    range: str | None
    authorization: str | None


@dataclass
class FakeHub:
    """Serves repositories: a dict of file contents each. The fields may be changed between requests."""

    repositories: dict[str, dict[str, bytes]]
    commits: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    token: str | None = None  # without it, repositories do not exist
    gated: bool = False  # lists answer, files do not
    status: int | None = None  # of every answer, as when the hub is down
    stated: dict[str, str] = field(default_factory=dict)  # another sha256 or size than the bytes have, by path
    sizes: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)  # of the next transfers: "damage", "break", "busy" or ""
    after: str = ""  # the fault of all transfers after those
    break_after: int = 500_000  # bytes, of a transfer that breaks
    ignores_ranges: bool = False
    pause: float = 0.0  # seconds after each chunk
    chunk: int = 65536
    requests: list[Request] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.servers = [_serve(self, cdn=cdn) for cdn in (False, True)]
        self.endpoint, self.cdn = (f"http://127.0.0.1:{server.server_port}" for server in self.servers)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def transfers(self) -> list[Request]:
        """The requests for bytes of large files."""
        return [each for each in self.requests if each.path.startswith("/cdn/") and each.method == "GET"]

    def environment(self, home: Any) -> dict[str, str]:
        """Return what a process needs to use this hub, with its cache in `home`."""
        return {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}

    def use_here(self, monkeypatch: pytest.MonkeyPatch, home: Any) -> None:
        """Make this process use the hub. (The hub's library reads the environment once, when it is imported.)"""
        template = f"{self.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        constants: dict[str, Any] = {"ENDPOINT": self.endpoint, "HUGGINGFACE_CO_URL_TEMPLATE": template}
        constants |= {"HF_HUB_CACHE": str(home / "hub"), "HF_HUB_DISABLE_XET": True}
        for name, value in constants.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)

    def listing(self, repo: str) -> list[dict[str, Any]]:
        found = []
        for path, content in self.repositories[repo].items():
            size = self.sizes.get(path, len(content))
            entry = {"type": "file", "path": path, "size": size, "oid": hashlib.sha1(content).hexdigest()}
            if len(content) > SMALL:
                entry["lfs"] = {"oid": self.sha256(path, content), "size": size, "pointerSize": 130}
            found.append(entry)
        return found

    def sha256(self, path: str, content: bytes) -> str:
        return self.stated.get(path) or hashlib.sha256(content).hexdigest()


def _serve(hub: FakeHub, *, cdn: bool) -> http.server.ThreadingHTTPServer:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            asked = [self.headers.get(name) for name in ("Range", "Authorization")]
            hub.requests.append(Request(self.command, path, *asked))
            if hub.status is not None:
                return self.answer(b"{}", hub.status)
            if cdn:
                return self.transfer(path)
            if hub.token is not None and asked[1] != f"Bearer {hub.token}" and not hub.gated:
                return self.answer(b"{}", 401, {"X-Error-Code": "RepoNotFound"})
            match path.strip("/").split("/", 5):
                case ["api", "models", org, name, *rest] if f"{org}/{name}" in hub.repositories:
                    return self.describe(f"{org}/{name}", rest)
                case [org, name, "resolve", revision, *rest] if f"{org}/{name}" in hub.repositories:
                    return self.resolve(f"{org}/{name}", revision, "/".join(rest))
            return self.answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET  # noqa: N815

        def describe(self, repo: str, rest: list[str]) -> None:
            match rest:
                case [] | ["revision", _]:
                    asked = rest[1] if rest else "main"
                    commit = asked if asked in hub.commits.values() else hub.commits.get(asked)
                    if commit is None:
                        return self.answer(b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
                    return self.answer(json.dumps({"id": repo, "sha": commit, "siblings": []}).encode())
                case ["tree", commit] if commit in hub.commits.values():
                    return self.answer(json.dumps(hub.listing(repo)).encode())
            return self.answer(b"{}", 404, {"X-Error-Code": "RevisionNotFound"})

        def resolve(self, repo: str, revision: str, path: str) -> None:
            content = hub.repositories[repo].get(path)
            headers = {"X-Repo-Commit": revision}
            if content is None:
                return self.answer(b"{}", 404, headers | {"X-Error-Code": "EntryNotFound"})
            if hub.gated and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self.answer(b"{}", 403, headers | {"X-Error-Code": "GatedRepo"})
            if len(content) <= SMALL:
                return self.answer(content, 200, headers | {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'})
            headers |= {"X-Linked-Etag": f'"{hub.sha256(path, content)}"', "X-Linked-Size": str(len(content))}
            return self.answer(b"", 302, headers | {"Location": f"{hub.cdn}/cdn/{repo}/{path}"})

        def transfer(self, path: str) -> None:
            _, org, name, inner = path.strip("/").split("/", 3)
            content = hub.repositories[f"{org}/{name}"][inner]
            fault = hub.faults.pop(0) if hub.faults else hub.after
            if fault == "busy":
                return self.answer(b"", 503)
            begin, end, status = 0, len(content), 200
            if (asked := self.headers.get("Range")) and not hub.ignores_ranges:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                begin, end, status = int(first), int(last) + 1, 206
            body = content[begin:end]
            if fault == "damage":
                body = bytes([body[0] ^ 1]) + body[1:]
            headers = {"Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"} if status == 206 else {}
            self.close_connection = fault == "break"
            return self.answer(body, status, headers, hub.break_after if fault == "break" else None)

        def answer(
            self, body: bytes, status: int = 200, headers: dict[str, str] | None = None, most: int | None = None
        ) -> None:
            self.send_response(status)
            for key, value in ({"Content-Type": "application/json"} | (headers or {})).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            body = body[:most]
            for begin in range(0, len(body), hub.chunk):
                self.wfile.write(body[begin : begin + hub.chunk])
                time.sleep(hub.pause)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server
