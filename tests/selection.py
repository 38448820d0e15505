"""Which of many values `make test` runs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest


def slow_except(values: Collection[Any], *quick: Any) -> list[Any]:
    """Return parameters for `parametrize`: `make test` runs the `quick` values, `make test-integration` the others.

    A tuple holds a value for each of several arguments.
    """
    assert all(each in values for each in quick), f"{quick} are not all among {list(values)}"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if value in quick else pytest.mark.slow
        )
        for value in values
    ]
