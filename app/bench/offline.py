"""What the benchmarks without a client share: the model in this process, and the file of the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from app.config.settings import Settings
from app.config.sources import Given, check_settings
from app.library import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)


def open_llm(settings: Settings, **unless_given: Any) -> LLM:
    """Load the model with these settings; `unless_given` are the values of settings that were not given."""
    others = {name: value for name, value in unless_given.items() if name not in settings.model_fields_set}
    return LLM.of(check_settings({n: Given(v, n) for n, v in others.items()} | given_of(settings)))


def given_of(settings: Settings) -> dict[str, Given]:
    """Return the settings that were given, as `check_settings` takes them."""
    return {name: Given(getattr(settings, name), name) for name in settings.model_fields_set}


def percentiles_of(seconds: list[float]) -> dict[str, float]:
    """By percent, as vLLM's benchmarks write them."""
    return dict(zip(map(str, PERCENTILES), np.percentile(seconds, PERCENTILES).tolist(), strict=True))


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Write a result where one is wanted."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"Result: {path}")
