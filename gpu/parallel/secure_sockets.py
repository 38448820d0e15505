"""ZMQ sockets between machines, authenticated and encrypted by CURVE with keys that are made for one client.

Ranks on several machines use them. ZMQ drops the messages of strangers before Headrace reads them.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Self

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

# The limit of a message from another machine. All logits of a long prompt's step take about half of it.
MAX_MESSAGE_BYTES = 256 * 2**20
# ZMQ's threads probe each other, however busy Python is. A machine that is silent for longer counts as lost.
PROBE_SECONDS, SILENCE_SECONDS = 1.0, 5.0
HANDSHAKE_SECONDS = 5.0  # until a client has shown its key

Socket = zmq.Socket[bytes]


class Keys(msgspec.Struct, frozen=True):
    """The keys with which one client proves its identity. They are secret and must not be logged."""

    server_public: bytes
    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return "Keys(...)"


class CurveServer:
    """A context manager. Its sockets accept only clients that have its keys, and leaving it drops unsent messages."""

    def __init__(self, host: str) -> None:
        """`host` is the address at which clients reach this machine."""
        self._host = f"[{host}]" if ":" in host else host
        self._known: set[bytes] = set()

    def __enter__(self) -> Self:
        self._public, self._secret = zmq.curve_keypair()
        with ExitStack() as stack:
            self._context = zmq.Context()
            stack.callback(self._context.destroy, linger=0)
            authenticator = ThreadAuthenticator(self._context)
            authenticator.start()
            stack.callback(authenticator.stop)
            authenticator.configure_curve_callback(credentials_provider=self)
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._resources.close()

    def bind(self, kind: int) -> tuple[Socket, str]:
        """Bind a socket without a high-water mark. Returns it and its address."""
        socket = _limited(self._context.socket(kind))
        socket.curve_server = True
        socket.curve_secretkey = self._secret
        socket.ipv6 = self._host.startswith("[")
        socket.bind(f"tcp://{self._host}:*")
        address = socket.last_endpoint
        assert isinstance(address, bytes)
        return socket, address.decode()

    def new_keys(self) -> Keys:
        """Make the keys of one client."""
        public, secret = zmq.curve_keypair()
        self._known.add(public)
        return Keys(self._public, public, secret)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return True if the key is a client's. ZMQ's authenticator calls this."""
        return key in self._known


def connect(socket: Socket, address: str, keys: Keys) -> None:
    """Connect a client's socket without reconnects: messages that are sent between two connections would be lost."""
    _limited(socket)
    socket.curve_serverkey = keys.server_public
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    socket.ipv6 = "[" in address
    socket.reconnect_ivl = -1
    socket.connect(address)


def _limited(socket: Socket) -> Socket:
    socket.set_hwm(0)
    socket.heartbeat_ivl = round(1000 * PROBE_SECONDS)
    socket.heartbeat_timeout = round(1000 * SILENCE_SECONDS)
    socket.handshake_ivl = round(1000 * HANDSHAKE_SECONDS)
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    return socket
