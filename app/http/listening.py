"""Listening sockets: port sharing at a restart, and sockets passed by systemd.

The kernel hands a connection to a listening socket before anybody accepts it, and resets it when that socket is closed.
Two ways to share a port, and what each of them needs so that nothing is lost:

1. One socket, which several processes have inherited: who closes its own descriptor closes nothing. All that
   has to be waited for are connections that were accepted in this moment.
2. A socket for each process (SO_REUSEPORT). The kernel spreads new connections over all of them until the very moment
   one is closed, so this one is made to ignore new ones first: a filter drops their first packet, which a client
   sends again after a second. By then those that had begun are accepted, the socket is closed, and the second try
   arrives at another. (`net.ipv4.tcp_migrate_req` would do without the second, but it is the machine's to set.)

`app.http.hypercorn` puts this in the place of what asyncio and trio listen by; `app.application` stops it.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from app.config.settings import SettingsError

if TYPE_CHECKING:
    pass


logger = logging.getLogger(__name__)

SECONDS_TO_BEGIN = 0.5  # for a handshake on its way, of any distance; less than clients wait before they try again
SO_ATTACH_FILTER = 26  # of Linux
# Classic BPF over a TCP segment: drop it if of SYN and ACK (0x12, in byte 13) only SYN is set, else keep all of it.
_DROP_SYN = ((0x30, 0, 0, 13), (0x54, 0, 0, 0x12), (0x15, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))

_listening: list[tuple[Any, Callable[[], object], Callable[[], object]]] = []  # sockets, how to stop, how to close


is_open = anyio.Event()  # set when the server listens


async def start_server(
    on_connection: Callable[..., Awaitable[None]], *, sock: socket.socket, **more: Any
) -> asyncio.Server:
    """asyncio's, to be stopped by `stop_listening`. uvloop has served whom it has accepted, and has no such reader."""
    server = await asyncio.start_server(on_connection, sock=sock, **more)
    _listening.append((sock, partial(asyncio.get_running_loop().remove_reader, sock), server.close))
    is_open.set()
    return server


async def serve_listeners(handler: Callable[..., Awaitable[None]], listeners: list[Any], **more: Any) -> None:
    """trio's, which ends, instead of never, when `stop_listening` is called."""
    import trio

    with trio.CancelScope() as scope:
        _listening.extend((listener.socket, scope.cancel, lambda: None) for listener in listeners)
        is_open.set()
        await trio.serve_listeners(handler, listeners, **more)


async def stop_listening(*, inherited: bool) -> None:
    """Close the sockets, whether they were inherited or are this process's own. Returns when every connection that they
    had is the server's, or another process's that has the same socket."""
    for listener, _, _ in () if inherited else _listening:
        _ignore_newcomers(listener)
        await anyio.sleep(SECONDS_TO_BEGIN)
        while _num_waiting(listener):  # noqa: ASYNC110 - the kernel's to know
            await anyio.sleep(0.01)
    for _, stop, _ in _listening:
        stop()
    await anyio.sleep(0.05)  # asyncio loses whom it has accepted and does not serve yet when it closes
    for _, _, close in _listening:
        close()


def _ignore_newcomers(listener: Any) -> None:
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in _DROP_SYN))
    try:
        listener.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", len(_DROP_SYN), ctypes.addressof(program))
        )
    except OSError as error:
        logger.warning("Connections that are just being made may be lost: %s", error.strerror)


def _num_waiting(listener: Any) -> int:
    """Connections that nobody has accepted yet: `tcpi_unacked`, by which a listening socket tells them."""
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
    return int(struct.unpack_from("I", info, 24)[0])


# -------------------------------------------------------------------------------------------------------------- systemd
# What systemd and a service tell each other: the socket that it has opened (sd_listen_fds), and how the server is
# (sd_notify). Without it, nothing happens here. Any other supervisor may speak the same.


FIRST_DESCRIPTOR = 3  # SD_LISTEN_FDS_START


def inherited_listener() -> socket.socket | None:
    """The listening socket that came with the process, if one did. Other processes may have it, too.

    Raises SettingsError if what came is something else."""
    process, count = (os.environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS"))
    if process != str(os.getpid()):
        return None
    if count != "1":
        raise SettingsError(f"LISTEN_FDS: got {count} sockets; one is served. What works: a single ListenStream=")
    try:
        listener = socket.socket(fileno=FIRST_DESCRIPTOR)
        is_listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:
        is_listening = False
    if not is_listening:
        raise SettingsError(
            f"LISTEN_FDS: descriptor {FIRST_DESCRIPTOR} is no socket that listens. What works: ListenStream="
        )
    return listener


def notify(state: str) -> None:
    """Tell systemd, if it asked to be told: ``READY=1``."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        # A word that is lost costs a restart at worst; one that is waited for would cost every stream.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel, suppress(OSError):
            channel.setblocking(False)
            channel.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
