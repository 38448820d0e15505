"""The process of `headrace serve`: workers, Hypercorn, SIGHUP, shutdown.

1. The port is bound before the model is loaded, so that a port in use is reported at once.
2. One process serves.
3. Only `headrace serve` can open a Unix socket, or serve TLS with a certificate that is renewed while it runs.
4. asyncio, uvloop and trio behave alike. `deploy/hypercorn.toml` has the same values for `hypercorn app:main`.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import math
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import anyio
from anyio import to_thread
from hypercorn.config import Config
from hypercorn.typing import ASGIFramework

from app.admission.tenants import Tenants
from app.config.settings import Settings, SettingsError
from app.http.hypercorn import patch_hypercorn
from app.http.listening import Certificate, is_open, notify

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from app.serving.model_pool import ModelPool


BACKLOG = 1024
GRACEFUL_TIMEOUT = 3  # seconds, after the application's own drain
SHUTDOWN_TIMEOUT = 10  # seconds, of the lifespan, after that
STARTUP_TIMEOUT = 7 * 86400  # seconds: where the port is shared, the application starts when the model is loaded


def bind(settings: Settings) -> socket.socket:
    """Return the server's socket. Raises `SettingsError` if host and port, or the path of `uds`, cannot be bound.

    The socket listens already, unless the port is shared: then the other servers take the connections until the model
    is loaded.
    """
    if settings.uds is not None:
        return _bind_path(settings.uds, int(settings.uds_mode, 8))
    host, port = settings.host, settings.port
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
    except socket.gaierror as error:
        raise SettingsError(
            f"host: got {host!r}; allowed: an address of this machine ({error.strerror}). A value that works: 127.0.0.1"
        ) from error
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted connections inherit it: no delayed tokens
    try:
        if settings.reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        if not settings.reuse_port:
            # Two sockets may share an address until one listens, so binding alone does not refuse a second server.
            listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise SettingsError(_bind_error(host, port, error)) from error
    return listener


def _bind_path(path: Path, mode: int) -> socket.socket:
    """Return the Unix socket at `path`, after removing one there that no process listens on. The folder is locked, or
    else another server could remove the new socket as the old one."""
    listener = socket.socket(socket.AF_UNIX)
    folder = -1
    try:
        folder = os.open(path.parent, os.O_RDONLY)
        fcntl.flock(folder, fcntl.LOCK_EX)
        if path.is_socket():
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(1.0)
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:
                    path.unlink()
        umask = os.umask(0o777 & ~mode)  # not a chmod afterwards: the socket never has wider permissions
        try:
            listener.bind(str(path))
        finally:
            os.umask(umask)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        why = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            why = "a server listens there" if path.is_socket() else "the file there is no socket"
        raise SettingsError(
            f"uds: cannot listen on {path}: {why}. What works: a new path of at most 107 bytes in a folder of its user"
        ) from error
    finally:
        if folder >= 0:
            os.close(folder)
    return listener


def run(
    app: ASGIApp,
    settings: Settings,
    listener: socket.socket,
    shutdown_trigger: Callable[[], Awaitable[None]] | None = None,
    certificate: Certificate | None = None,
) -> None:
    """Serve on `listener` until `shutdown_trigger` returns (by default at SIGTERM or Ctrl-C), then drain and return. A
    second Ctrl-C does not wait for the drain."""
    config = hypercorn_config(settings, listener)
    if certificate is not None:
        config.certfile, config.keyfile = str(certificate.certfile), str(certificate.keyfile)
        config.create_ssl_context = certificate.listening_context  # type: ignore[method-assign]
        config.ssl_handshake_timeout = settings.body_timeout  # before its handshake a connection is not counted
    trigger = shutdown_trigger or _signalled
    asgi = cast(ASGIFramework, app)  # Hypercorn has a type for each message, Starlette has mappings
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
    """Return Hypercorn's configuration; deploy/hypercorn.toml has the reasons."""
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


def _bind_error(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        free = f"headrace serve --port {port + 1}"
        return f"Port {port} on {host} is in use. Stop what listens there, or take another: {free}"
    if error.errno == errno.EACCES:
        return f"Port {port} needs rights that this user has not. Take one above 1023: headrace serve --port 8000"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"host: got {host!r}; allowed: an address of this machine. A value that works: 127.0.0.1"
    return f"Cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}. An address that works: 127.0.0.1:8000"


# ------------------------------------------------------------------------------------------------------------- shutdown
# The shutdown: drain at the first request to stop, end at once at the second.
#
# A request to stop is a signal to this process, or Hypercorn's own trigger: with `hypercorn app:main` the application
# runs in a child process, and the parent stops it by an event. A signal to the whole process group (by systemd or a
# terminal) causes both, in either order and milliseconds apart; they count as one request.


logger = logging.getLogger(__name__)

ONE_REQUEST_SECONDS = 1.0  # a signal within this time after the parent's event belongs to the same request to stop


class Shutdown:
    """The shutdown of one application. `drain` is called once and returns when no request is left."""

    def __init__(self, drain: Callable[[], Awaitable[None]], *, has_parent: bool | None = None) -> None:
        """`has_parent`: True if a parent process of Hypercorn may trigger the shutdown, too; by default, if one
        exists."""
        self._drain = drain
        self._has_parent = multiprocessing.parent_process() is not None if has_parent is None else has_parent
        self._asked = anyio.Event()
        self._asked_since: float | None = None
        self._signalled = False
        self._drained = anyio.Event()
        self._draining = False

    async def wait_asked(self) -> None:
        await self._asked.wait()

    async def listen_for_signals(self) -> None:
        """Handle SIGTERM and SIGINT: the first requests a shutdown, the second ends the process at once."""
        if threading.current_thread() is not threading.main_thread():
            return  # the server of `headrace chat`, which ends it without signals
        with anyio.open_signal_receiver(*_unignored(signal.SIGTERM, signal.SIGINT)) as signals:
            async for number in signals:
                if self._is_second():
                    logger.warning("%s again: not waiting for the drain", signal.Signals(number).name)
                    logging.shutdown()
                    os._exit(128 + number)
                self._signalled = True
                self._ask()

    async def wait_and_drain(self, trigger: Callable[[], Awaitable[None]]) -> None:
        """Wait for `trigger` or a signal, then drain. Called by `app.http.hypercorn.drain_before_shutdown`."""
        async with anyio.create_task_group() as task_group:

            async def wait_for(event: Callable[[], Awaitable[None]]) -> None:
                await event()
                task_group.cancel_scope.cancel()

            task_group.start_soon(wait_for, trigger)
            task_group.start_soon(wait_for, self._asked.wait)
        self._ask()
        if not self._draining:
            self._draining = True
            await self._drain()
            self._drained.set()
        await self._drained.wait()

    def _ask(self) -> None:
        self._asked_since = self._asked_since or time.monotonic()
        self._asked.set()

    def _is_second(self) -> bool:
        """Return True if a signal that has just come is the second request to stop."""
        if self._signalled or self._asked_since is None:
            return self._signalled
        # Without a parent, the first request was a signal too, even if the trigger of `serve` took it.
        return not self._has_parent or time.monotonic() - self._asked_since >= ONE_REQUEST_SECONDS


def _unignored(*numbers: signal.Signals) -> list[signal.Signals]:
    """Return the signals that this process does not ignore. A worker of Hypercorn ignores SIGINT, because its parent
    handles Ctrl-C for both."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


# ------------------------------------------------------------------------------------------------------------ reloading
# SIGHUP: a running server reads the tenants of `api_keys_file`, its certificate and `models_dir` again.


_STAYS = "api_keys, admin_keys and other settings stay as they were at the start"


def ignore_hangup(settings: Settings) -> None:
    """Ignore SIGHUP before and after `reload_on_hangup`, because it would end the process."""
    if _takes_hangup(settings):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


async def reload_on_hangup(pool: ModelPool, certificate: Certificate | None = None) -> None:
    """Read the tenants, the certificate and the models' folder again at each SIGHUP. Keys that are gone
    from the file are refused at once; running requests keep their tenants. A file with an error changes nothing."""
    settings = pool.settings
    if not _takes_hangup(settings):
        return
    before = signal.getsignal(signal.SIGHUP)
    try:
        with anyio.open_signal_receiver(signal.SIGHUP) as signals:
            async for _ in signals:
                if certificate is not None:
                    await _renew(certificate)
                await pool.refresh(now=True)
                if settings.api_keys_file is not None:
                    await _reload_tenants(pool)
                elif certificate is None and settings.models_dir is None:
                    logger.warning("SIGHUP changed nothing: there is no api_keys_file, and %s", _STAYS)
    finally:
        signal.signal(signal.SIGHUP, before)  # asyncio would leave the default


async def _renew(certificate: Certificate) -> None:
    try:
        await to_thread.run_sync(certificate.renew)
    except SettingsError as error:
        logger.error("The certificate stays as it was. %s", error)
    else:
        logger.info("The certificate was read again, for connections from now on")


async def _reload_tenants(pool: ModelPool) -> None:
    server = pool.server
    try:
        tenants = await to_thread.run_sync(Tenants, server.settings)
    except SettingsError as error:
        logger.error("Tenants and keys stay as they were. %s", error)
        return
    server.tenants.replace(tenants)
    pool.check_tenants()
    for model in pool.active:
        model.admission.set_tenants(tenants.all)
    server.metrics.set_tenants({tenant.name for tenant in tenants.all}, busy=server.busy_tenants)
    logger.info("Tenants and keys were read again, tenants: %d; %s", len(tenants.all), _STAYS)


def _takes_hangup(settings: Settings) -> bool:
    if threading.current_thread() is not threading.main_thread():
        return False
    files = (settings.api_keys_file, settings.ssl_certfile, settings.models_dir)
    has_files = any(each is not None for each in files)
    return has_files or not os.isatty(0)  # the terminal sends SIGHUP when it is closed


# -------------------------------------------------------------------------------------------------------------- workers
# `hypercorn --workers 2 app:main` is refused. Each worker would load its own model and have its own kept responses,
# queue and prefix cache: half of the responses would not be found, and no limit would hold. The number of workers is
# read from Hypercorn's configuration, which is an argument of each worker's process.


_TIMEOUT = 10.0  # seconds in which all workers start


def check_socket_settings(settings: Settings) -> None:
    """Raise `SettingsError` for the settings of a socket, where another program than `headrace serve` opens it."""
    for name in ("uds", "ssl_certfile"):
        if getattr(settings, name) is not None:
            raise SettingsError(
                f"{name}: got {getattr(settings, name)}; only headrace serve opens its socket itself. What works: "
                f"headrace serve, or {name} unset and hypercorn --bind unix:PATH, or --certfile FILE --keyfile FILE"
            )


def check_workers() -> None:
    """Raise `SettingsError` if Hypercorn is configured to start more than one worker."""
    process: Any = multiprocessing.current_process()
    parent = multiprocessing.parent_process()
    config = getattr(process, "_kwargs", {}).get("config")
    workers = getattr(config, "workers", 1)
    if parent is None or workers <= 1:
        return
    # The last worker reports the error, because a worker that still starts when its parent ends would log a traceback
    # after it. The others end with their parent.
    if process._identity[-1] < workers:
        parent.join(_TIMEOUT)
        if not parent.is_alive():
            os._exit(1)
    raise SettingsError(
        f"workers: got {workers}, allowed: 1. Each worker would load the model again, with its own responses and "
        "limits. What works: hypercorn --workers 1 app:main. For more engines in one server, set data_parallel_size"
    )


async def keep_informed(pool: ModelPool) -> None:
    """Send systemd READY=1 when the port is open and the model is loaded, then WATCHDOG=1 while /livez would answer
    200."""
    if "NOTIFY_SOCKET" not in os.environ:
        return
    await pool.server.loaded.wait()
    await is_open.wait()
    notify("READY=1")
    interval = float(os.environ.get("WATCHDOG_USEC", math.inf)) / 2e6
    while interval < math.inf:
        if pool.is_alive:
            notify("WATCHDOG=1")
        await anyio.sleep(interval)
