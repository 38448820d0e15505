"""A simulation as a file that the dashboard plays: JSON lines of frames."""

from __future__ import annotations

from typing import BinaryIO

import msgspec

from app.dashboard.frames import make_frame
from engine.simulation.simulation import Simulation


class Recording:
    """Writes a frame of each engine whenever `watch` is called."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._latest: dict[int, int] = {}  # step of each engine that was told of
        self._seen = 0

    def watch(self, simulation: Simulation) -> None:
        """What has happened since the call before."""
        for replica in simulation.engines.replicas:
            snapshot = replica.core.snapshot()
            frame = make_frame(snapshot, engine=replica.index, after_step=self._latest.get(replica.index, 0))
            if snapshot.steps:
                self._latest[replica.index] = snapshot.steps[-1].step
            self._file.write(msgspec.json.encode(frame) + b"\n")
