"""ZMQ between machines: CURVE, by which each side proves to the other that it has the keys which were made for it.

The engine's transport stands on it, and ranks of one model that run on several machines. Strangers are dropped by ZMQ
before anybody looks at what they send.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Self

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

# Of what comes from another machine: the logits of a long step's prompt, all of them, are about half of it.
MAX_MESSAGE_BYTES = 256 * 2**20
# ZMQ's own threads ask each other whether they are there, however busy Python is. So long may a machine be silent.
PROBE_SECONDS, SILENCE_SECONDS = 1.0, 5.0
HANDSHAKE_SECONDS = 5.0  # until who connects has shown his key

Socket = zmq.Socket[bytes]


class Keys(msgspec.Struct, frozen=True):
    """What one client proves itself with. Secret: it must not come to a log."""

    server_public: bytes
    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return "Keys(...)"


class CurveServer:
    """Sockets that let in who got keys from here, and nobody else. A context manager; leaving it drops what is still
    to be sent."""

    def __init__(self, host: str) -> None:
        """`host`: the address of this machine at which clients find it."""
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
        """A socket without a high-water mark, and its address."""
        socket = _limited(self._context.socket(kind))
        socket.curve_server = True
        socket.curve_secretkey = self._secret
        socket.ipv6 = self._host.startswith("[")
        socket.bind(f"tcp://{self._host}:*")
        address = socket.last_endpoint
        assert isinstance(address, bytes)
        return socket, address.decode()

    def new_keys(self) -> Keys:
        """For one client."""
        public, secret = zmq.curve_keypair()
        self._known.add(public)
        return Keys(self._public, public, secret)

    def callback(self, domain: str, key: bytes) -> bool:
        """Asked by ZMQ's authenticator."""
        return key in self._known


def connect(socket: Socket, address: str, keys: Keys) -> None:
    """Connect a client's socket, once: what is sent while nobody hears would be lost without a word."""
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
