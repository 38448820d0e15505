"""What has to be mended in Hypercorn 0.18 for a server that many clients visit briefly, and that supervisors restart.

`close_connections_with_their_clients`: a connection whose client has left is closed at once. `app.runner` applies it,
and so must whoever starts Hypercorn otherwise, before the first connection. `end_parent`: the whole server fails.

Hypercorn ends a connection when all of its tasks have ended, and one of them is the keep-alive timer, which nobody
stops when the client hangs up. So every client that leaves without being told to (curl, a health probe, a load
balancer's check) costs a socket in CLOSE_WAIT and three tasks until the timer runs out: 75 s here, as it has to outlast
the timers of proxies. At 20 such clients a second that is 1,500 sockets, more than the usual limit of a process.

`hypercorn app:main` runs the application in a worker process, and loses the status of a worker that has failed:
`hypercorn.run.run` joins the remaining workers, of whom there are none, and returns theirs, 0. To systemd or Docker
that reads as a server that is done.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from multiprocessing.synchronize import SemLock
from typing import Any

from hypercorn.events import Event, Updated

_SERVERS = ("hypercorn.asyncio.run", "hypercorn.trio.run")


def close_connections_with_their_clients() -> None:
    """Mend those of Hypercorn's workers that are imported in this process. Idempotent."""
    for name in _SERVERS:
        module: Any = sys.modules.get(name)
        if module is not None and not issubclass(module.TCPServer, _LeavesWithItsClient):
            module.TCPServer = type("TCPServer", (_LeavesWithItsClient, module.TCPServer), {})


def end_parent() -> None:
    """End the process that Hypercorn started this one from, if there is one; by SIGUSR1, which it does not handle."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    os.kill(parent.pid, signal.SIGUSR1)
    # What it would have cleared away on a better day; otherwise a warning about it would have the last word in the log.
    for lock in gc.get_objects():
        if isinstance(lock, SemLock):
            SemLock._cleanup(lock._semlock.name)  # type: ignore[attr-defined]


class _LeavesWithItsClient:
    """Mixed into Hypercorn's `TCPServer`s, which for this purpose are alike on asyncio and trio."""

    idle_task: Any
    _client_gone = False

    async def _read_data(self) -> None:
        await super()._read_data()  # type: ignore[misc]  # of Hypercorn's class: returns at the end of the client's bytes
        self._client_gone = True
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        # An answer that ends after its client has left would start the timer again.
        if not (self._client_gone and isinstance(event, Updated)):
            await super().protocol_send(event)  # type: ignore[misc]
