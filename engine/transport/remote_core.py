"""An engine's side of a connection between machines: `engine.transport.remote` has the other.

The process lives as long as its connection to the front end, and keeps the front end's time: deadlines and events are
in that, whatever this machine's clock says.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from functools import partial
from typing import NoReturn

import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.commands import Command
from engine.core.core import EngineCore
from engine.core.heartbeat import Heartbeat
from engine.curve import connect
from engine.transport.process_core import Build, ProcessChannel, keep_what_is_loaded, run_and_exit, vital
from engine.transport.wire import Ends, Ping, Pulse, decoder

logger = logging.getLogger(__name__)

_LOST = (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED)


def serve_remote(build: Build, ends: Ends) -> NoReturn:
    """Be an engine of the front end at these ends, then exit. `build` is what `serve_parent` takes."""
    channel = RemoteChannel(ends)
    setup = channel.connect()

    def make_core() -> EngineCore:
        core = build(setup, channel.report)
        core.clock = channel.front_end_time
        core.heartbeat.wake()
        channel.heartbeat = core.heartbeat
        keep_what_is_loaded()
        return core

    run_and_exit(make_core, channel)


class RemoteChannel(ProcessChannel):
    """A channel to the front end of another machine, which tells its time and is told the heartbeat."""

    def __init__(self, ends: Ends) -> None:
        super().__init__(ends)
        self.heartbeat = Heartbeat()
        self._ahead: float | None = None  # of this machine's clock to the front end's, in seconds
        self._is_closing = False

    def front_end_time(self) -> float:
        return time.monotonic() - (self._ahead or 0.0)

    def close(self) -> None:
        self._is_closing = True
        super().close()

    def _listen(self) -> None:
        decode = decoder(Command | Ping).decode
        while True:
            message = decode(self._receive())
            if isinstance(message, Ping):
                self._answer(message)
            else:
                self.put(message)

    def _answer(self, ping: Ping) -> None:
        arrived = time.monotonic()
        # What was under way for the shortest time knows best.
        self._ahead = arrived - ping.now if self._ahead is None else min(self._ahead, arrived - ping.now)
        heartbeat = self.heartbeat
        self.send(Pulse(arrived - heartbeat.last_progress, heartbeat.is_asleep, heartbeat.kv_sequence))

    def _connect(self, socket: zmq.Socket[bytes], address: str) -> None:
        keys = self._ends.keys
        assert keys is not None
        monitor = socket.get_monitor_socket()
        watch = partial(self._end_with_connection, monitor)
        threading.Thread(target=vital, args=(watch,), name="lifeline", daemon=True).start()
        connect(socket, address, keys)

    def _end_with_connection(self, monitor: zmq.Socket[bytes]) -> None:
        with monitor, suppress(zmq.ContextTerminated):
            while (event := recv_monitor_message(monitor)["event"]) != zmq.EVENT_MONITOR_STOPPED:
                if event in _LOST and not self._is_closing:
                    logger.error("The connection to the front end is lost")
                    logging.shutdown()
                    os._exit(1)
