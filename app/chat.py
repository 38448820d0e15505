"""`headrace chat`: a conversation in the terminal.

It speaks HTTP to a server: to one that runs already, or to one that it starts for itself in a thread, on a free port
of the loopback address and behind a key that only it knows. So a conversation goes the way of every other request,
and Ctrl-C in the middle of an answer is a client that leaves.
"""

from __future__ import annotations

import http.client
import json
import readline  # noqa: F401  (input() gets line editing and history by it)
import secrets
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import anyio
from pydantic import SecretStr
from rich.console import Console

from app.settings import Settings, SettingsError
from engine.errors import HeadraceError

_HELP = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


class ChatError(HeadraceError):
    """The server did not answer as it should; the message is its own where it had one."""


def chat_with(url: str, settings: Settings, *, system: str | None, temperature: float | None) -> int:
    """Talk to the server at `url`, with the first of `settings.api_keys` if there is one."""
    key = settings.api_keys[0].get_secret_value() if settings.api_keys else None
    # Another server has its own models: ask for what the user named, else for whatever it serves.
    client = ChatClient(url, key)
    names = client.model_names()
    model = settings.model_names[0] if settings.model_names[0] in names else names[0]
    _converse(client, model, system=system, temperature=temperature)
    return 0


def chat_here(settings: Settings, *, system: str | None, temperature: float | None) -> int:
    """Run the server in this process and talk to it."""
    key = secrets.token_urlsafe(32)
    settings = settings.model_copy(
        update={
            "host": "127.0.0.1",
            "port": 0,
            "api_keys": (SecretStr(key),),
            "drain_timeout": 1.0,
            "log_requests": False,
            "log_level": "error",
        }
    )
    with _server(settings) as url:
        client = ChatClient(url, key)
        with Console(stderr=True).status("Starting") as status:
            client.wait_until_ready(status.update)
        _converse(client, settings.model_names[0], system=system, temperature=temperature)
    return 0


class ChatClient:
    """The few calls of the OpenAI API that a conversation needs, on the standard library alone."""

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(f"--url: got {url!r}; allowed: an http or https address, such as http://127.0.0.1:8000")
        self._url = url
        self._connection_type = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._netloc = parts.netloc
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def model_names(self) -> list[str]:
        """Names that the server answers to, at least one."""
        with self._request("GET", "/v1/models") as response:
            return [model["id"] for model in json.load(response)["data"]]

    def wait_until_ready(self, on_progress: Callable[[str], None], poll_seconds: float = 0.2) -> None:
        """Return when the server can make a token, and tell meanwhile what it does. Raises `ChatError` if it fails."""
        while True:
            with self._request("GET", "/readyz", check=False) as response:
                if response.status == 200:
                    return
                status = json.load(response)
            if status["phase"] not in ("starting", "ready"):
                raise ChatError(f"The server is {status['phase']}.")
            share = f" {100 * status['done'] // status['total']} %" if status["total"] else ""
            on_progress(f"{status['task'] or 'Starting'}{share}")
            time.sleep(poll_seconds)

    def stream(
        self, model: str, messages: list[dict[str, str]], temperature: float | None
    ) -> Generator[str, None, None]:
        """The pieces of the answer to `messages`. Closing the iterator early hangs up, which aborts the request."""
        body: dict[str, Any] = {"model": model, "messages": messages, "stream": True}
        if temperature is not None:
            body["temperature"] = temperature
        with self._request("POST", "/v1/chat/completions", body) as response:
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ChatError(chunk["error"]["message"])
                for choice in chunk["choices"]:
                    if text := choice["delta"].get("content"):
                        yield text

    @contextmanager
    def _request(
        self, method: str, path: str, body: object = None, *, check: bool = True
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connection_type(self._netloc)
        try:
            payload = None if body is None else json.dumps(body).encode()
            connection.request(method, self._prefix + path, body=payload, headers=self._headers)
            response = connection.getresponse()
            if check and response.status != 200:
                raise ChatError(_error_message(response))
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"No answer from {self._url} ({error}). Start a server there: headrace serve") from error
        finally:
            connection.close()


def _converse(client: ChatClient, model: str, *, system: str | None, temperature: float | None) -> None:
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    print(f"{model}. {_HELP}")
    while True:
        try:
            said = input("\n> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n{_HELP}")
            continue
        if said in ("/exit", "/quit"):
            return
        if said == "/reset":
            messages = list(start)
        elif said:
            messages.append({"role": "user", "content": said})
            answer = _show(client, model, messages, temperature)
            if answer:
                messages.append({"role": "assistant", "content": answer})
            else:
                messages.pop()  # two user turns in a row confuse many templates


def _show(client: ChatClient, model: str, messages: list[dict[str, str]], temperature: float | None) -> str:
    pieces: list[str] = []
    stream = client.stream(model, messages, temperature)
    try:
        for piece in stream:
            pieces.append(piece)
            # A model may emit escape sequences; a terminal should not obey them.
            print("".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in piece), end="")
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(" ...", end="")
    except ChatError as error:
        print(f"\n{error}\n/reset starts over.", end="", file=sys.stderr)
    finally:
        stream.close()
    print()
    return "".join(pieces)


@contextmanager
def _server(settings: Settings) -> Iterator[str]:
    from app.application import create_app
    from app.runner import bind, run

    listener = bind(settings)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    stop = threading.Event()

    async def stopped() -> None:
        await anyio.to_thread.run_sync(stop.wait, abandon_on_cancel=True)

    thread = threading.Thread(
        target=run, args=(create_app(settings), settings, listener, stopped), name="headrace-server", daemon=True
    )
    thread.start()
    try:
        yield url
    finally:
        stop.set()
        thread.join()


def _error_message(response: http.client.HTTPResponse) -> str:
    text = response.read().decode("utf-8", "replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status}: {text[:200]}"
