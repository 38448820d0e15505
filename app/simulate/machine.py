"""The simulated machine: step costs of a model, its KV cache, and the server's settings."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import numpy as np

from app.config.engine import engine_config
from app.config.settings import Settings, SettingsError
from app.config.sources import load_settings
from app.workload.report import STEPS
from engine.config import EngineConfig
from engine.costs.table import SPREAD_BOUNDS, StepCostTable
from engine.messages import FACTS_OF_PLANS, ModelFacts
from engine.simulation.counting import CountingExecutor, StepCost, VirtualClock

# Settings that step costs and the size of the KV cache depend on. A simulation cannot change their values.
FIXED = (
    *("kv_cache_memory", "gpu_memory_utilization", "block_size", "dtype", "quantization", "device", "num_threads"),
    *("kv_cache_dtype", "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel"),
)
MAX_FILE_BYTES = 64 * 2**20
UNKNOWN_NUM_BLOCKS = 2**16  # for a file without the size of the KV cache: a million tokens
# Seconds of a request outside the engine's steps: HTTP, JSON, tokenizing and admission before, detokenizing and sending
# after. An estimate: a third of the medians on two cores at a load of 3 per core (1.0 ms in for a text of 64 tokens,
# 18 ms for 1,500, 2.8 ms out), until it is measured on an idle machine.
INBOUND, INBOUND_PER_TOKEN, OUTBOUND = 0.2e-3, 4e-6, 0.9e-3


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The properties of an engine that determine its timing."""

    table: StepCostTable
    num_blocks: int = UNKNOWN_NUM_BLOCKS
    block_size: int = 16
    max_model_len: int = 2**15
    pipeline_depth: int = 1
    facts: ModelFacts = field(default_factory=ModelFacts)
    memory: int | None = None  # bytes of weights, KV cache and engine
    load_seconds: float | None = None

    def inbound(self, num_tokens: int) -> float:
        """Return the seconds from sending a prompt to its arrival at the engine."""
        return INBOUND + INBOUND_PER_TOKEN * num_tokens

    @property
    def outbound(self) -> float:
        """The seconds from the end of a step to the arrival of its tokens at the client."""
        return OUTBOUND

    def config(self, settings: Settings) -> EngineConfig:
        """Return the config that the server makes of the same settings."""
        longest = min(
            self.max_model_len, settings.max_model_len or self.max_model_len, self.num_blocks * self.block_size
        )
        return engine_config(settings, replace(self, max_model_len=longest))

    def executor(self, clock: VirtualClock, cost: StepCost) -> CountingExecutor:
        """Return an executor that makes its steps on this clock."""
        return CountingExecutor(self.num_blocks, self.block_size, cost, clock=clock, sleep=clock.sleep)

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Self:
        """Return the machine of a /server_info answer or of a bare table. Raises ValueError."""
        if "step_cost" not in info:
            return cls(table=StepCostTable.from_json(json.dumps(info).encode()))
        kv_cache, told = (
            {**each} if isinstance(each := info.get(name), dict) else {} for name in ("kv_cache", "settings")
        )
        size = told.get("data_parallel_size") or 1
        given = {
            "num_blocks": kv_cache.get("num_blocks"),
            "block_size": kv_cache.get("block_size"),
            "max_model_len": info.get("max_model_len"),
            "pipeline_depth": info.get("pipeline_depth"),
            "data_parallel_size": size,
        }
        if wrong := [name for name, value in given.items() if not (value is None or _is_count(value))]:
            raise ValueError(f"{wrong[0]}: got {given[wrong[0]]!r}; allowed: a whole number, at least 1")
        for name in ("memory", "load_seconds"):
            given[name] = value = info.get(name)
            if not (value is None or (isinstance(value, int | float) and 0 <= value < 2**60)):
                raise ValueError(f"{name}: got {value!r}; allowed: a number, at least 0")
        table = StepCostTable.from_json(json.dumps(info["step_cost"]).encode())
        windows = kv_cache.get("kv_windows") or [None]
        if not isinstance(windows, list) or not all(each is None or _is_count(each) for each in windows):
            raise ValueError(f"kv_windows: got {windows!r}; allowed: a list of nulls and whole numbers")
        del given["data_parallel_size"]
        if given["num_blocks"]:  # the total of all engines
            given["num_blocks"] = max(1, given["num_blocks"] // size)
        return cls(
            table=table,
            facts=ModelFacts(
                **{name: kv_cache[name] for name in FACTS_OF_PLANS if name in kv_cache} | {"kv_windows": tuple(windows)}
            ),
            **{name: value for name, value in given.items() if value is not None},
        )


def table_facts(table: StepCostTable) -> str:
    """Return in words when a table was measured, at which load, with how many steps of which sizes, and its spread."""
    age = timedelta(seconds=max(0, int(time.time() - table.measured_at)))
    text = f"measured {age} ago" if table.measured_at else "of unknown age"
    if table.machine_load is not None:
        text += f" at a load average of {table.machine_load:.1f}"
    bins = np.zeros(len(SPREAD_BOUNDS) - 1, np.int64)
    sizes = []
    for name, what in STEPS.items():
        curve = getattr(table, name)
        if known := [size for size, count in zip(curve.sizes, curve.counts, strict=True) if count]:
            sizes.append(f"{what} {known[0]:,} to {known[-1]:,} tokens ({sum(curve.counts):,} steps)")
        bins += sum(np.array(each.bins) for each in curve.spread if each.bins)
    text += f": {', '.join(sizes)}. "
    if not (total := bins.sum()):
        return text + "It has no spread: every step takes exactly its cost."
    most = SPREAD_BOUNDS[int(np.searchsorted(bins.cumsum(), 0.99 * total)) + 1]
    return text + f"99 % of {total:,} steps took at most {math.exp(most):.2f} times their cost; the spread is drawn."


def _one_engine(info: dict[str, Any], model: str) -> dict[str, Any]:
    """Return this model's engine, or the only one, from a GPU benchmark's result; return other data unchanged. Raises
    ValueError."""
    engines = info.get("engines")
    if not isinstance(engines, dict):
        return info
    engine = engines.get(model) or (next(iter(engines.values())) if len(engines) == 1 else None)
    if not isinstance(engine, dict):
        raise ValueError(f"engines: no engine of --model {model} was measured; allowed: {', '.join(engines)}")
    return engine


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 2**31


def read_machine(
    path: Path, settings: Settings, num_blocks: int | None = None, *, flag: str = "--table"
) -> tuple[Machine, Settings]:
    """Return the machine of a file and its server's settings, overridden by those given here. Raises SettingsError that
    names the `flag`."""
    works = "What works: a file with a server's answer to GET /server_info"
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"more than {MAX_FILE_BYTES} bytes")
        info = json.loads(data)
        if not isinstance(info, dict):
            raise ValueError("not a JSON object")
        info = _one_engine(info, settings.model)
        machine, merged = machine_of(info, settings)
    except OSError as error:
        raise SettingsError(f"{flag}: cannot read {path}: {error.strerror}. {works}") from None
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{flag}: {path} is wrong: {error}. {works}") from None
    _check_fixed(info, settings, flag)
    return (machine if num_blocks is None else replace(machine, num_blocks=num_blocks)), merged


def _check_fixed(info: Mapping[str, Any], settings: Settings, flag: str) -> None:
    """Raise SettingsError if a given setting differs from the one of the table's measurement."""
    told = info.get("settings")
    for name in FIXED:
        value = getattr(settings, name)
        if name in settings.model_fields_set and not (isinstance(told, dict) and told.get(name) == value):
            hint = "--num-blocks sets the size of the KV cache" if "memory" in name else "Leave it out"
            raise SettingsError(
                f"--{name.replace('_', '-')}: got {value}; the file of {flag} was measured with another value, or does "
                f"not name it. {hint}, or give a table that was measured with it"
            )


def machine_of(info: Mapping[str, Any], settings: Settings) -> tuple[Machine, Settings]:
    """Return the machine of a /server_info answer and its settings, overridden by those given here. Raises ValueError
    and SettingsError."""
    told = info.get("settings")
    theirs = told if isinstance(told, dict) else {}
    theirs = {name: value for name, value in theirs.items() if name in Settings.model_fields and value is not None}
    return Machine.of(info), with_settings(settings, theirs, but_given=True)


def with_settings(settings: Settings, changes: Mapping[str, Any], *, but_given: bool = False) -> Settings:
    """Return the settings with changes, checked as flags are. Raises SettingsError."""
    given = {name: getattr(settings, name) for name in settings.model_fields_set}
    return load_settings({**changes, **given} if but_given else {**given, **changes})
