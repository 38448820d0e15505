"""What goes from one stage to the next where they are on several machines: over real sockets, without Ray."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import zmq

from engine.errors import RankLost
from gpu.parallel import ray_ranks
from gpu.parallel.ray_ranks import CurveServer, Keys, StageReader, StageWriter


def test_messages_of_any_length_reach_every_rank_and_a_lost_connection_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_ranks, "PART_BYTES", 1000)
    monkeypatch.setattr(ray_ranks, "SILENCE_SECONDS", 0.0)
    with CurveServer("127.0.0.1") as server, ThreadPoolExecutor() as pool:
        bound = [server.bind(zmq.PUSH) for _ in range(2)]
        coming = [pool.submit(StageReader, rank, bound[rank][1], server.new_keys()) for rank in range(2)]
        writer = StageWriter([bound_socket for bound_socket, _ in bound])
        readers = [reader.result() for reader in coming]
        messages = [bytes(range(256)) * 20, b"x", b"y" * 1000]
        for message in messages:
            writer.write(message, lambda: None)
        assert [[reader.read() for _ in messages] for reader in readers] == [messages] * 2
    for rank, reader in enumerate(readers):
        with pytest.raises(RankLost, match=f"rank {rank} on .* has lost its connection"):
            reader.read()


def test_strangers_are_not_heard_and_disturb_nobody() -> None:
    own_public, own_secret = zmq.curve_keypair()
    with CurveServer("127.0.0.1") as server, ExitStack() as stack:
        bound, address = server.bind(zmq.PULL)
        context = stack.enter_context(zmq.Context())
        keys = server.new_keys()

        def talk(with_keys: Keys | None, said: bytes) -> None:
            client = stack.enter_context(context.socket(zmq.PUSH))
            client.linger = 0
            if with_keys is not None:
                client.curve_serverkey = with_keys.server_public
                client.curve_publickey, client.curve_secretkey = with_keys.public, with_keys.secret
            client.connect(address)
            client.send(said)

        talk(None, b"no key")
        talk(Keys(keys.server_public, own_public, own_secret), b"the right server, a stranger's key")
        talk(Keys(own_public, keys.public, keys.secret), b"the wrong server")
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        for number in range(100):
            raw = stack.enter_context(socket.create_connection((host, int(port))))
            raw.sendall(os.urandom(64) if number % 2 else b"\xff" + bytes(8) + b"\x7f\x03\x00")
        assert not bound.poll(500)
        talk(keys, b"ours")
        assert bound.recv() == b"ours"
        assert not bound.poll(500)


def test_keys_are_not_shown() -> None:
    keys = Keys(b"p" * 40, b"q" * 40, b"s" * 40)
    assert "ssss" not in f"{keys!r} {keys}"


def test_a_stage_that_does_not_let_us_in_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_ranks, "MEETING_SECONDS", 0.5)
    with CurveServer("127.0.0.1") as server:
        _, address = server.bind(zmq.PUSH)
        public, secret = zmq.curve_keypair()
        with pytest.raises(RankLost, match="rank 3 on .* cannot reach the stage before it"):
            StageReader(3, address, Keys(server.new_keys().server_public, public, secret))
