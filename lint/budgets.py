"""The bounds that `make lint` holds the code to, from `lint/budgets.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PACKAGES = ("app", "engine", "gpu", "protocol")


def budgets() -> dict[str, Any]:
    """Return the tables of the budget file."""
    return tomllib.loads(Path(__file__).with_name("budgets.toml").read_text())


def report_excess(measured: Iterable[tuple[str, int, int]]) -> int:
    """Print every (name, value, bound) whose value exceeds its bound. Returns 1 if there is one, else 0."""
    exceeded = [(name, value, bound) for name, value, bound in measured if value > bound]
    for name, value, bound in exceeded:
        print(f"{name}: {value}, at most {bound} by lint/budgets.toml. Reduce it, or raise the bound and say why.")
    return 1 if exceeded else 0
