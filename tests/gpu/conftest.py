"""What tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu.checkpoint.families.table import FAMILIES
from gpu.cpu.library import Library, load_library, usable
from tests.gpu.foreign_files import Loader
from tests.gpu.sampling_helpers import fastest_draw
from tests.selection import slow_except

BUILDS = list(usable())  # the best first


@pytest.fixture(scope="module", params=slow_except(BUILDS, *BUILDS[:1]), ids=lambda library: library.name)
def every_build(request) -> Iterator[Library]:
    """Put each build of the library that this processor runs in the place of the best, for a whole file of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpu.cpu.library.usable", lambda: iter([request.param]))
        load_library.cache_clear()
        fastest_draw.cache_clear()
        yield request.param
    load_library.cache_clear()
    fastest_draw.cache_clear()


@pytest.fixture(scope="module")
def sinks_family() -> Iterator[None]:
    """The family of `tests.gpu.sink_models` is one of those that are served."""
    from tests.gpu.sink_models import FAMILY  # which takes long to import

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, FAMILY.name, FAMILY)
        yield


@pytest.fixture(scope="module")
def loader() -> Iterator[Loader]:
    with Loader() as loader:
        yield loader
