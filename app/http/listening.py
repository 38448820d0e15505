"""Listening sockets: port sharing at a restart, TLS, and sockets passed by systemd.

The kernel queues new connections at a listening socket until they are accepted, and resets them when that socket is
closed. Processes can share a port in two ways; each needs a different procedure so that no connection is lost:

1. The processes have inherited one socket. A process that closes its descriptor does not close the socket. The process
   only waits for the connections that it is just accepting.
2. Each process has its own socket (SO_REUSEPORT). The kernel spreads new connections over all of them until one is
   closed. So first a filter on that socket drops the first packet of new connections, which a client sends again after
   a second. By then the connections that had begun are accepted, the socket is closed, and the packet arrives at a
   socket of another process. (`net.ipv4.tcp_migrate_req` would save the second, but it is a setting of the machine.)

`app.http.hypercorn` replaces the listening functions of asyncio and trio by these; `app.application` stops them.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import math
import os
import socket
import ssl
import struct
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from app.config.settings import Settings, SettingsError

logger = logging.getLogger(__name__)

SECONDS_TO_BEGIN = 0.5  # enough for a handshake over any distance; shorter than the second before a client's retry
SO_ATTACH_FILTER = 26  # the value on Linux
# Classic BPF over a TCP segment: drop it if its flags (byte 13) have SYN but not ACK (mask 0x12), else keep all of it.
_DROP_SYN = ((0x30, 0, 0, 13), (0x54, 0, 0, 0x12), (0x15, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))

_listening: list[tuple[Any, Callable[[], object], Callable[[], object]]] = []  # sockets with their stop and close


is_open = anyio.Event()  # set when the server listens


async def start_server(
    on_connection: Callable[..., Awaitable[None]], *, sock: socket.socket, backlog: int, ssl: Any = None, **tls: Any
) -> asyncio.Server:
    """Start asyncio's server so that `stop_listening` can stop it. uvloop has no reader to remove, and needs none: it
    serves every connection that it has accepted. With TLS, `on_connection` is called before the handshake, so that it
    can count the connection; it must await `handshake` of its writer."""

    def connected(reader: asyncio.StreamReader, writer: Any) -> Awaitable[None]:
        if ssl is not None:
            writer.transport.get_protocol()._over_ssl = True  # asyncio sets it late, and warns of an EOF before
            writer.handshake = _begin(writer.start_tls(ssl, **tls))
        return on_connection(reader, writer)

    server = await asyncio.start_server(connected, sock=sock, backlog=backlog)
    _listening.append((sock, partial(asyncio.get_running_loop().remove_reader, sock), server.close))
    is_open.set()
    return server


def _begin(coroutine: Coroutine[Any, None, None]) -> Awaitable[None]:
    """Do the first step of a coroutine now, and return an awaitable of the others. A task would begin it after uvloop
    has read bytes, which TLS would miss."""
    first = coroutine.send(None)

    @types.coroutine
    def rest() -> Generator[Any, None, None]:
        yield first
        yield from coroutine.__await__()

    return rest()


async def serve_listeners(handler: Callable[..., Awaitable[None]], listeners: list[Any], **more: Any) -> None:
    """Run trio's `serve_listeners` until `stop_listening` is called."""
    import trio

    with trio.CancelScope() as scope:
        sockets = [
            getattr(listener, "transport_listener", listener).socket for listener in listeners
        ]  # the former: TLS
        _listening.extend((sock, scope.cancel, lambda: None) for sock in sockets)
        is_open.set()
        await trio.serve_listeners(handler, listeners, **more)


async def stop_listening(*, inherited: bool) -> None:
    """Close the listening sockets. `inherited`: other processes have the same sockets. Returns when every connection
    that was queued at them is served here, or left to such a process."""
    for listener, _, _ in () if inherited else _listening:
        _ignore_newcomers(listener)
        await anyio.sleep(SECONDS_TO_BEGIN)
        while _num_waiting(listener):  # noqa: ASYNC110 - the kernel has no event for this
            await anyio.sleep(0.01)
    for _, stop, _ in _listening:
        stop()
    await anyio.sleep(0.05)  # on close, asyncio would lose connections that it has accepted but does not serve yet
    for _, _, close in _listening:
        close()


def _ignore_newcomers(listener: Any) -> None:
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in _DROP_SYN))
    try:
        listener.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", len(_DROP_SYN), ctypes.addressof(program))
        )
    except OSError as error:
        logger.warning("Connections that clients open during this stop may be lost: %s", error.strerror)


def _num_waiting(listener: Any) -> int:
    """Return the number of connections that wait to be accepted: `tcpi_unacked` of a listening socket."""
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
    return int(struct.unpack_from("I", info, 24)[0])


# ------------------------------------------------------------------------------------------------------------------ TLS


class Certificate:
    """The certificate of a listening socket, with its key. It can be renewed while the server runs: each handshake
    takes the latest. Raises SettingsError for files that cannot be used."""

    def __init__(self, certfile: Path, keyfile: Path) -> None:
        self.certfile, self.keyfile = certfile, keyfile
        self._latest = self._read()

    @classmethod
    def of(cls, settings: Settings) -> Certificate | None:
        certfile, keyfile = settings.ssl_certfile, settings.ssl_keyfile
        if certfile is not None:
            return cls(certfile, keyfile or certfile)
        if keyfile is not None:
            raise SettingsError(f"ssl_keyfile: got {keyfile}, and no ssl_certfile. What works: both, or neither")
        return None

    def renew(self) -> None:
        """Read the files again. Raises SettingsError and keeps the certificate if they cannot be used."""
        self._latest = self._read()

    def listening_context(self) -> ssl.SSLContext:
        """Return a context that takes the latest certificate at each handshake."""
        context = self._read()

        def take_latest(connection: ssl.SSLObject, *_: object) -> None:
            connection.context = self._latest

        context.sni_callback = take_latest  # called also if the client names no server
        return context

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            for path in (self.certfile, self.keyfile):
                path.open("rb").close()  # its error names the file, unlike that of the next call
            context.load_cert_chain(self.certfile, self.keyfile, password=lambda: "")  # or else it asks the terminal
        except OSError as error:
            why = error.reason if isinstance(error, ssl.SSLError) else f"{error.filename}: {error.strerror}"
            raise SettingsError(
                f"ssl_certfile, ssl_keyfile: cannot use {self.certfile} with {self.keyfile} ({why}). What works: PEM "
                "files of a certificate, followed by its chain, and of its own private key without a passphrase"
            ) from error
        return context


# -------------------------------------------------------------------------------------------------------------- systemd
# The protocol between systemd and a service: systemd passes the socket that it has opened (sd_listen_fds), the service
# reports its state (sd_notify). Other supervisors may use it, too. Without its variables nothing happens here.


FIRST_DESCRIPTOR = 3  # SD_LISTEN_FDS_START


def inherited_listener() -> socket.socket | None:
    """Return the listening socket that the supervisor passed to the process, or None. Other processes may have it, too.

    Raises SettingsError if it passed anything else."""
    process, count = (os.environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS"))
    if process != str(os.getpid()):
        return None
    if count != "1":
        raise SettingsError(f"LISTEN_FDS: got {count} sockets; allowed: 1. Use a single ListenStream=")
    try:
        listener = socket.socket(fileno=FIRST_DESCRIPTOR)
        is_listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:
        is_listening = False
    if not is_listening:
        raise SettingsError(f"LISTEN_FDS: descriptor {FIRST_DESCRIPTOR} is not a listening socket. Use ListenStream=")
    return listener


def notify(state: str) -> None:
    """Send a state such as ``READY=1`` to systemd, if NOTIFY_SOCKET is set. Never blocks."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        # A lost message costs a restart at worst; waiting for a blocked socket would stall every stream.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel, suppress(OSError):
            channel.setblocking(False)
            channel.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)


def outlive_lack_of_descriptors() -> None:
    """Log a lack of descriptors on asyncio at most once per second. uvloop closes a connection that cannot be accepted,
    and trio waits a tenth of a second."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # on trio
        return
    others = loop.get_exception_handler()
    last = -math.inf

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            if time.monotonic() - last >= 1:
                last = time.monotonic()
                logger.error("No connection can be accepted for a moment: %s", error.strerror)
        elif others is not None:
            others(loop, context)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
