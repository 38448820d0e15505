"""Runs the application under Hypercorn in this process, as `headrace serve` and `headrace chat` do.

`app.cli` imports it. It promises that a port which cannot be had is known before anything is loaded, and stays ours
from then on; that one process serves, because it holds one engine; and that asyncio, uvloop and trio behave alike.
`deploy/hypercorn.toml` holds the same values for those who start Hypercorn themselves.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import anyio
from hypercorn.config import Config
from hypercorn.typing import ASGIFramework

from app.hypercorn_patches import patch_hypercorn
from app.settings import Settings, SettingsError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

BACKLOG = 1024
GRACEFUL_TIMEOUT = 3  # seconds, after the application's own drain
SHUTDOWN_TIMEOUT = 10  # seconds, of the lifespan, after that
STARTUP_TIMEOUT = 7 * 86400  # seconds: where the port is shared, the application starts when the model is loaded


def bind(settings: Settings) -> socket.socket:
    """The socket that the server will listen on. Raises `SettingsError` when host and port cannot be had.

    It listens already, unless the port is shared: then connections go to those who have it until the model is loaded.
    """
    host, port = settings.host, settings.port
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
    except socket.gaierror as error:
        raise SettingsError(
            f"host: got {host!r}, which is no address of this machine ({error.strerror}). A value that works: 127.0.0.1"
        ) from error
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted connections inherit it: no delayed tokens
    try:
        if settings.reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        if not settings.reuse_port:
            # Binding alone does not refuse a second server: two sockets may share an address until one listens.
            listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise SettingsError(_why_not(host, port, error)) from error
    return listener


def run(
    app: ASGIApp,
    settings: Settings,
    listener: socket.socket,
    shutdown_trigger: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serve until `shutdown_trigger` returns (by default: SIGTERM or Ctrl-C), then drain and return.

    Takes over `listener`. A second Ctrl-C does not wait for the drain.
    """
    config = hypercorn_config(settings, listener)
    trigger = shutdown_trigger or _signalled
    asgi = cast(ASGIFramework, app)  # Hypercorn spells out every message type, Starlette says mapping
    if settings.worker_class == "trio":
        import trio
        from hypercorn.trio import serve as serve_trio

        patch_hypercorn()
        trio.run(partial(serve_trio, asgi, config, shutdown_trigger=trigger))
        return

    from hypercorn.asyncio import serve as serve_asyncio

    patch_hypercorn()
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if settings.worker_class == "uvloop":
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(serve_asyncio(asgi, config, shutdown_trigger=trigger))


def hypercorn_config(settings: Settings, listener: socket.socket) -> Config:
    """Hypercorn's configuration, with the reasons in deploy/hypercorn.toml."""
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.backlog = BACKLOG
    config.keep_alive_timeout = 75
    config.keep_alive_max_requests = 1_000_000
    config.graceful_timeout = GRACEFUL_TIMEOUT
    config.shutdown_timeout = SHUTDOWN_TIMEOUT
    config.startup_timeout = STARTUP_TIMEOUT
    config.h11_max_incomplete_size = 64 * 1024
    config.alpn_protocols = ["http/1.1"]
    config.include_server_header = False
    config.accesslog = None
    return config


async def _signalled() -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            return


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        free = f"headrace serve --port {port + 1}"
        return f"Port {port} on {host} is in use. Stop what listens there, or take another: {free}"
    if error.errno == errno.EACCES:
        return f"Port {port} needs rights that this user has not. Take one above 1023: headrace serve --port 8000"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"host: got {host!r}, which is no address of this machine. A value that works: 127.0.0.1"
    return f"Cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}. An address that works: 127.0.0.1:8000"
