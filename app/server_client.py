"""What the commands that talk to a server ask it: a few calls of its API, on the standard library alone."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import SplitResult, urlsplit

from app.settings import SettingsError
from engine.errors import HeadraceError

_UNPRINTABLE = "\n\t\u200d"  # and yet a part of texts; the last one joins emoji


class ServerError(HeadraceError):
    """The server did not answer as it should; the message is its own where it had one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status  # None: it did not answer at all


def server_address(flag: str, url: str) -> tuple[SplitResult, str]:
    """An address, checked, and what comes before the paths of its API, whether or not it ends in /v1 as clients of
    OpenAI's API write it. Raises SettingsError."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts, parts.path.rstrip("/").removesuffix("/v1")
    except ValueError:  # of the port, or of an IPv6 address
        pass
    raise SettingsError(f"{flag}: got {url!r}; allowed: an http or https address, such as http://127.0.0.1:8000")


class ServerClient:
    """One server, asked with one key. `timeout` is of silence, in seconds; None waits for as long as it takes."""

    def __init__(self, url: str, key: str | None = None, *, timeout: float | None = None) -> None:
        parts, self._prefix = server_address("--url", url)
        if key and not (key.isascii() and key.isprintable()):
            raise SettingsError("--api-key: has characters that cannot be sent; allowed: printable ASCII")
        self.url = url
        self._connection_type = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._netloc = parts.netloc
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._timeout = timeout

    def get(self, path: str) -> bytes:
        """The body of what is there. Raises `ServerError`."""
        with self._request("GET", path) as response:
            return response.read()

    def models(self) -> list[dict[str, Any]]:
        """The cards of what is served, at least one."""
        with self.understood():
            cards: list[dict[str, Any]] = json.loads(self.get("/v1/models"))["data"]
            _ = cards[0]["id"]
        return cards

    def wait_until_ready(self, on_progress: Callable[[str], None], poll_seconds: float = 0.2) -> None:
        """Return when the server can make a token; tell meanwhile what it does. Raises `ServerError` if it fails."""
        while True:
            with self._request("GET", "/readyz", check=False) as response:
                if response.status == 200:
                    return
                status = json.load(response)
            if status["phase"] not in ("starting", "ready"):
                raise ServerError(f"The server is {status['phase']}.")
            share = f" {100 * status['done'] // status['total']} %" if status["total"] else ""
            on_progress(f"{status['task'] or 'Starting'}{share}")
            time.sleep(poll_seconds)

    def stream(self, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The chunks of a chat completion, the one with the usage too. Closing the iterator early hangs up, which
        aborts the request. Raises `ServerError`, also if the answer breaks off."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self._request("POST", "/v1/chat/completions", body) as response:
            is_over = False
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    is_over |= data == b"[DONE]"
                    continue
                with self.understood():
                    chunk = json.loads(data)
                    if error := chunk.get("error"):
                        raise ServerError(printable(str(error["message"])))
                yield chunk
        if not is_over:
            raise ServerError(
                f"The connection to {self.url} ended before the answer did: the text shown is incomplete."
            )

    @contextmanager
    def understood(self) -> Iterator[None]:
        """Read what the server has said: what is not as it should be is a `ServerError`."""
        try:
            yield
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ServerError(f"What {self.url} answers is not understood: {printable(repr(error)[:200])}") from error

    @contextmanager
    def _request(
        self, method: str, path: str, body: object = None, *, check: bool = True
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connection_type(self._netloc, timeout=self._timeout)
        try:
            payload = None if body is None else json.dumps(body).encode()
            connection.request(method, self._prefix + path, body=payload, headers=self._headers)
            response = connection.getresponse()
            if check and response.status != 200:
                raise ServerError(_error_message(response), response.status)
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"No answer from {self.url} ({error}). Start a server there: headrace serve") from error
        finally:
            connection.close()


def printable(text: str) -> str:
    """What others wrote may have escape sequences in it; a terminal should not obey them."""
    return "".join(c if c.isprintable() or c in _UNPRINTABLE else "\N{REPLACEMENT CHARACTER}" for c in text)


def _error_message(response: http.client.HTTPResponse) -> str:
    text = response.read().decode("utf-8", "replace")
    try:
        return printable(str(json.loads(text)["error"]["message"]))
    except (ValueError, LookupError, TypeError):
        return f"HTTP {response.status}: {printable(text[:200])}"
