"""What systemd and a service tell each other: the socket that it has opened (sd_listen_fds), and how the server is
(sd_notify). Without it, nothing happens here. Any other supervisor may speak the same.
"""

from __future__ import annotations

import math
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

from app import listening
from app.settings import SettingsError

if TYPE_CHECKING:
    from app.server import Server  # which notifies

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


async def keep_informed(server: Server) -> None:
    """READY=1 once the port is open and tokens can be made, then WATCHDOG=1 for as long as /livez would say 200."""
    if "NOTIFY_SOCKET" not in os.environ:
        return
    await server.loaded.wait()
    await listening.is_open.wait()
    notify("READY=1")
    interval = float(os.environ.get("WATCHDOG_USEC", math.inf)) / 2e6
    while interval < math.inf:
        if server.is_alive:
            notify("WATCHDOG=1")
        await anyio.sleep(interval)
