"""What goes from one stage to the next where they are on several machines: over real sockets, without Ray."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from engine.curve import CurveServer, Keys
from engine.errors import RankLost
from gpu.parallel import ray_ranks
from gpu.parallel.ray_ranks import StageReader, StageWriter

pytestmark = pytest.mark.slow


def test_messages_of_any_length_reach_every_rank_and_a_lost_connection_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_ranks, "PIECE", 1000)
    monkeypatch.setattr(ray_ranks, "SILENCE_SECONDS", 0.0)
    with CurveServer("127.0.0.1") as server, ThreadPoolExecutor() as pool:
        bound = [server.bind(zmq.PUSH) for _ in range(2)]
        coming = [pool.submit(StageReader, rank, bound[rank][1], server.new_keys()) for rank in range(2)]
        writer = StageWriter([socket for socket, _ in bound])
        readers = [reader.result() for reader in coming]
        messages = [bytes(range(256)) * 20, b"x", b"y" * 1000]
        for message in messages:
            writer.write(message, lambda: None)
        assert [[reader.read() for _ in messages] for reader in readers] == [messages] * 2
    for rank, reader in enumerate(readers):
        with pytest.raises(RankLost, match=f"rank {rank} on .* has lost its connection"):
            reader.read()


def test_a_stage_that_does_not_let_us_in_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_ranks, "MEETING_SECONDS", 0.5)
    with CurveServer("127.0.0.1") as server:
        _, address = server.bind(zmq.PUSH)
        public, secret = zmq.curve_keypair()
        with pytest.raises(RankLost, match="rank 3 on .* cannot reach the stage before it"):
            StageReader(3, address, Keys(server.new_keys().server_public, public, secret))
