"""The file of step costs in the cache folder, one for each model, machine and settings that steps depend on.

1. It has the parts of /server_info that a simulation needs.
2. A file that cannot be read or written costs a measurement, never a start. Used on the engine's thread or process.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from stat import S_ISREG
from typing import Any

import msgspec
import orjson

from app.config.settings import Settings
from engine.costs.table import StepCostTable
from gpu.checkpoint import ModelFiles, default_cache_dir, model_digest, weight_paths

logger = logging.getLogger(__name__)

FOLDER = "step_costs"
MAX_BYTES = 65536  # of a file
MAX_FILES = 64
MUCH = 3.0  # if two tables differ by this factor, one is wrong, for example because other work delayed the steps

# The longest step of one decode on any useful machine: the weights are read once from slow memory, and a fixed cost.
_SLOWEST_MEMORY = 0.5e9  # bytes per second
_SLOWEST_STEP = 0.1  # seconds

# The settings that change the costs of steps, in addition to those in `machine`.
SETTINGS = ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_model_len", "pipeline_depth", "load_format")


def latest(settings: Settings) -> Path | None:
    """Return the file of this model with the most similar settings, the newest of several; None if there is none."""
    ranks = {file: rank for file in _folder(settings).glob("*.json") if (rank := _rank(file, settings)) is not None}
    return min(ranks, key=lambda file: ranks[file], default=None)


def _rank(file: Path, settings: Settings) -> tuple[int, float] | None:
    """Return a sort key: the number of settings that differ, then the age. None for another model or a foreign file."""
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
    times_of_earlier: float = 1.0  # the costs of this table divided by those of the one that it replaced


def difference(path: Path) -> str | None:
    """Return a warning if the table of this file differs much from the one that it replaced."""
    try:
        times = msgspec.json.decode(path.read_bytes(), type=_Content).times_of_earlier
    except (OSError, ValueError):
        return None
    return _difference(times)


def _difference(times: float) -> str | None:
    if times <= 0.0 or 1 / MUCH <= times <= MUCH:
        return None
    how = f"take up to {times:.2g} times as long" if times > 1.0 else f"are up to {1 / times:.2g} times as fast"
    return f"steps {how} as in an earlier measurement of this model on this machine; one of the two is wrong"


class StepCostFile:
    """One table of step costs, with the description of its engine."""

    def __init__(
        self, path: Path, description: Mapping[str, Any] | None = None, *, most_seconds: float = math.inf
    ) -> None:
        """A table in which a step of one decode takes more than `most_seconds` is neither read nor written."""
        self.path = path
        self._most_seconds = most_seconds
        self._description = dict(description or {})

    @classmethod
    def of(cls, settings: Settings, files: ModelFiles, machine: str, description: Mapping[str, Any]) -> StepCostFile:
        """Return the file for a model. `machine` names the device, processor, forms of weights and threads."""
        try:
            torch = version("torch")
        except PackageNotFoundError:
            torch = ""
        given = (model_digest(files).hex(), machine, version("headrace"), torch)
        chosen = [getattr(settings, name) for name in SETTINGS]
        name = hashlib.sha256(repr((given, chosen)).encode()).hexdigest()[:32]
        weights = sum(path.stat().st_size for path in weight_paths(files))
        most_seconds = _SLOWEST_STEP + weights / _SLOWEST_MEMORY if weights else math.inf
        return cls(_folder(settings) / f"{name}.json", description, most_seconds=most_seconds)

    def read(self) -> StepCostTable | None:
        """Return the table; None if there is none or it is damaged."""
        try:
            if not S_ISREG(self.path.stat().st_mode):
                raise ValueError("not a file")  # reading a pipe could block for ever
            with self.path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise ValueError(f"more than {MAX_BYTES} bytes")
            table = msgspec.json.decode(data, type=_Content).step_cost
            self._check(table)
            return table
        except FileNotFoundError:
            return None
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            logger.warning("The step costs in %s cannot be used and are measured again: %s", self.path, error)
            return None

    def _check(self, table: StepCostTable) -> None:
        if (seconds := table.decode.at(1)) > self._most_seconds:
            raise ValueError(f"{seconds:.2g} s for one decode is more than this model takes on any machine")

    def write(self, table: StepCostTable) -> None:
        """Write a table atomically, and delete the oldest of too many files."""
        try:
            self._check(table)
        except ValueError as error:
            logger.warning("The step costs are not kept: %s", error)
            return
        earlier = self.read()
        times = 1.0 if earlier is None else table.times_of(earlier)
        if (text := _difference(times)) is not None:
            logger.warning("Step costs: %s. Other work on the machine makes steps longer", text)
        content = {"step_cost": msgspec.to_builtins(table), "times_of_earlier": times}
        part = self.path.with_suffix(f".{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(orjson.dumps(self._description | content))
            part.replace(self.path)
            kept = sorted(self.path.parent.iterdir(), key=lambda each: each.stat().st_mtime, reverse=True)
            for old in kept[MAX_FILES:]:
                old.unlink(missing_ok=True)
        except OSError as error:
            logger.info("The step costs are not kept: %s", error)
