"""What tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import helm_python
import pytest

from tests.integration.deploy.helm_release import CHART


@pytest.fixture(scope="module")
def chart() -> Iterator[helm_python.Chart]:
    with helm_python.Chart.load(CHART) as loaded:
        yield loaded
