"""What has to be mended in Hypercorn 0.18 for a server that many clients visit briefly.

`app.runner` applies it, and so must whoever starts Hypercorn otherwise, before the first connection. It promises that
a connection whose client has left is closed at once.

Hypercorn ends a connection when all of its tasks have ended, and one of them is the keep-alive timer, which nobody
stops when the client hangs up. So every client that leaves without being told to (curl, a health probe, a load
balancer's check) costs a socket in CLOSE_WAIT and three tasks until the timer runs out: 75 s here, as it has to outlast
the timers of proxies. At 20 such clients a second that is 1,500 sockets, more than the usual limit of a process.
"""

from __future__ import annotations

import sys
from typing import Any

from hypercorn.events import Event, Updated

_SERVERS = ("hypercorn.asyncio.run", "hypercorn.trio.run")


def close_connections_with_their_clients() -> None:
    """Mend those of Hypercorn's workers that are imported in this process. Idempotent."""
    for name in _SERVERS:
        module: Any = sys.modules.get(name)
        if module is not None and not issubclass(module.TCPServer, _LeavesWithItsClient):
            module.TCPServer = type("TCPServer", (_LeavesWithItsClient, module.TCPServer), {})


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
