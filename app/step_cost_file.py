"""Where the table of step costs is kept between two starts: in the cache folder, a file for each model, machine and
settings that steps depend on.

Used on the engine's thread, or in its process. What cannot be read or written costs a measurement, never a start.
"""

from __future__ import annotations

import hashlib
import logging
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from app.settings import Settings
from engine.scheduler.step_cost import StepCostTable
from gpu.checkpoint import ModelFiles, default_cache_dir, model_digest

logger = logging.getLogger(__name__)

FOLDER = "step_costs"
MAX_BYTES = 65536  # of a file
MAX_FILES = 64

# The settings that change what a step costs, besides those that `machine` tells.
SETTINGS = ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_model_len", "pipeline_depth", "load_format")


class StepCostFile:
    """One table."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, settings: Settings, files: ModelFiles, machine: str) -> StepCostFile:
        """The file of what is served. `machine` tells device, processor, forms of weights and threads."""
        try:
            torch = version("torch")
        except PackageNotFoundError:
            torch = ""
        given = (model_digest(files).hex(), machine, version("headrace"), torch)
        chosen = [getattr(settings, name) for name in SETTINGS]
        name = hashlib.sha256(repr((given, chosen)).encode()).hexdigest()[:32]
        return cls((settings.cache_dir or default_cache_dir()) / FOLDER / f"{name}.json")

    def read(self) -> StepCostTable | None:
        """The table, if there is one that is whole."""
        try:
            with self.path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise ValueError(f"more than {MAX_BYTES} bytes")
            return StepCostTable.from_json(data)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("The step costs in %s are measured anew: %s", self.path, error)
            return None

    def write(self, table: StepCostTable) -> None:
        """Keep a table, whole or not at all; of too many files the oldest go."""
        part = self.path.with_suffix(f".{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(table.to_json())
            part.replace(self.path)
            kept = sorted(self.path.parent.iterdir(), key=lambda each: each.stat().st_mtime, reverse=True)
            for old in kept[MAX_FILES:]:
                old.unlink(missing_ok=True)
        except OSError as error:
            logger.info("The step costs are not kept: %s", error)
