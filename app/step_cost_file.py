"""Where the table of step costs is kept between two starts: in the cache folder, a file for each model, machine and
settings that steps depend on, which says what /server_info says, as far as a simulation needs it.

Used on the engine's thread, or in its process. What cannot be read or written costs a measurement, never a start.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from stat import S_ISREG
from typing import Any

import msgspec
import orjson

from app.settings import Settings
from engine.scheduler.step_cost import StepCostTable
from gpu.checkpoint import ModelFiles, default_cache_dir, model_digest

logger = logging.getLogger(__name__)

FOLDER = "step_costs"
MAX_BYTES = 65536  # of a file
MAX_FILES = 64

# The settings that change what a step costs, besides those that `machine` tells.
SETTINGS = ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_model_len", "pipeline_depth", "load_format")


def latest(settings: Settings) -> Path | None:
    """The file of the engine of this model that ended last, with these settings or those that differ least; None if
    there is none."""
    ranks = {file: rank for file in _folder(settings).glob("*.json") if (rank := _rank(file, settings)) is not None}
    return min(ranks, key=lambda file: ranks[file], default=None)


def _rank(file: Path, settings: Settings) -> tuple[int, float] | None:
    """How many of the settings that change costs are others, and then the latest first; None for another model, and for
    what is no such file."""
    try:
        if not file.is_file():
            return None
        content = orjson.loads(file.read_bytes())
        if not set(content["models"]) & set(settings.model_names):
            return None
        differences = sum(content["settings"].get(name) != getattr(settings, name) for name in SETTINGS)
        return differences, -file.stat().st_mtime
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None


def _folder(settings: Settings) -> Path:
    return (settings.cache_dir or default_cache_dir()) / FOLDER


class _Content(msgspec.Struct):
    step_cost: StepCostTable


class StepCostFile:
    """One table, and the description of the engine whose steps it tells of."""

    def __init__(self, path: Path, description: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._description = dict(description or {})

    @classmethod
    def of(cls, settings: Settings, files: ModelFiles, machine: str, description: Mapping[str, Any]) -> StepCostFile:
        """The file of what is served. `machine` tells device, processor, forms of weights and threads."""
        try:
            torch = version("torch")
        except PackageNotFoundError:
            torch = ""
        given = (model_digest(files).hex(), machine, version("headrace"), torch)
        chosen = [getattr(settings, name) for name in SETTINGS]
        name = hashlib.sha256(repr((given, chosen)).encode()).hexdigest()[:32]
        return cls(_folder(settings) / f"{name}.json", description)

    def read(self) -> StepCostTable | None:
        """The table, if there is one that is whole."""
        try:
            if not S_ISREG(self.path.stat().st_mode):
                raise ValueError("not a file")  # a pipe would be waited for without end
            with self.path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise ValueError(f"more than {MAX_BYTES} bytes")
            return msgspec.json.decode(data, type=_Content).step_cost
        except FileNotFoundError:
            return None
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            logger.warning("The step costs in %s are measured anew: %s", self.path, error)
            return None

    def write(self, table: StepCostTable) -> None:
        """Keep a table, whole or not at all; of too many files the oldest go."""
        part = self.path.with_suffix(f".{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(orjson.dumps(self._description | {"step_cost": msgspec.to_builtins(table)}))
            part.replace(self.path)
            kept = sorted(self.path.parent.iterdir(), key=lambda each: each.stat().st_mtime, reverse=True)
            for old in kept[MAX_FILES:]:
                old.unlink(missing_ok=True)
        except OSError as error:
            logger.info("The step costs are not kept: %s", error)
