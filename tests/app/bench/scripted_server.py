"""A server whose answers are bytes that a test has written down."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

Script = Callable[[dict[str, Any]], AsyncIterator[bytes]]
"""From the body of a request to the bytes that answer it, as they are to be written."""

SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class ScriptedServer:
    """What it was asked so far."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    asked: dict[str, dict[str, str]] = field(default_factory=dict)  # headers of the last GET, by path
    connections: int = 0


@contextmanager
def scripted(
    script: Script, *, tls: ssl.SSLContext | None = None, pages: Mapping[str, object] | None = None
) -> Iterator[ScriptedServer]:
    """Answers every POST by the script, which hangs up by an empty piece, and a GET by the page of its path."""
    server = ScriptedServer()
    ready = threading.Event()
    stop: list[Callable[[], object]] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:-2])
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if head.startswith("GET"):
                    page = (pages or {}).get(head.split(" ", 2)[1])
                    status = "404 Not Found" if page is None else "200 OK"
                    text = json.dumps(page)
                    writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())
                    server.asked[head.split(" ", 2)[1]] = headers
                    continue
                server.bodies.append(json.loads(body))
                server.headers.append(headers)
                async for piece in script(server.bodies[-1]):
                    if not piece:
                        return
                    writer.write(piece)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def serve() -> None:
        stopped = asyncio.Event()
        stop.append(partial(asyncio.get_running_loop().call_soon_threadsafe, stopped.set))
        listener = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
        server.url = f"http{'s' if tls else ''}://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        ready.set()
        await stopped.wait()
        listener.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    ready.wait(10)
    try:
        yield server
    finally:
        stop[0]()
        thread.join(10)


def event(text: str, finish_reason: str | None = None) -> str:
    """One of a stream of completions."""
    return f"data: {json.dumps({'choices': [{'index': 0, 'text': text, 'finish_reason': finish_reason}]})}\n\n"


def usage(prompt: int, completion: int, cached: int = 0) -> str:
    counts = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return f"data: {json.dumps({'choices': [], 'usage': counts})}\n\n"


def chunk(text: str) -> bytes:
    """A chunk of a chunked body."""
    data = text.encode()
    return b"%x\r\n%b\r\n" % (len(data), data)
