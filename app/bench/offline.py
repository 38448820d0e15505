"""What the benchmarks without a client share: the model in this process, and the file of the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from app.offline import LLM, SERVER_SETTINGS
from app.settings import Settings

PERCENTILES = (10, 25, 50, 75, 90, 99)


def open_llm(settings: Settings, **unless_given: Any) -> LLM:
    """The model of these settings, and of others where none was given."""
    given = {name: getattr(settings, name) for name in settings.model_fields_set - SERVER_SETTINGS}
    return LLM(**unless_given | given)


def percentiles_of(seconds: list[float]) -> dict[str, float]:
    """By percent, as vLLM's benchmarks write them."""
    return dict(zip(map(str, PERCENTILES), np.percentile(seconds, PERCENTILES).tolist(), strict=True))


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Write a result where one is wanted."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"Result: {path}")
