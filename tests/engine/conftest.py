"""Async tests of the engine run on every event loop that the server runs on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {}), id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
        pytest.param(("trio", {}), id="trio"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return request.param


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder in which a Unix socket fits: the path of `tmp_path` is too long for one where tests run side by side."""
    with tempfile.TemporaryDirectory(prefix="headrace-test-") as path:
        yield Path(path)
