"""What the garbage collector need not look at: modules that stay as long as the process, and requests that are alive.

The server's modules consist of hundreds of thousands of objects, with torch's some 400,000. While they are imported the
collector goes over them again and again for nothing, a sixth of the time to ready; and every full collection afterwards
would take 0.1 s and more to find them alive, in which no token moves.

Requests consist of some hundred objects each that live as long as their answers, and leave few cycles behind.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

NEW_OBJECTS: Final = 50_000  # more than were let go of, until the youngest are looked at; Python's own number is 700


@contextmanager
def frozen_imports(module: str) -> Iterator[None]:
    """For a block that imports `module` and all it needs: nothing is collected meanwhile, and what is there at its end
    is never looked at again. Does nothing if `module` was imported before, because then most of it would be garbage."""
    if module in sys.modules:
        yield
        return
    with no_collection():
        try:
            yield
        finally:
            gc.freeze()


@contextmanager
def no_collection() -> Iterator[None]:
    """For a block that leaves little garbage, or keeps all that it makes."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def collect_seldom() -> None:
    """From now on requests come and go. With 256 streams open the collector took a tenth of the event loop's time
    otherwise, and 0.1 s at a stretch for each full collection."""
    gc.set_threshold(NEW_OBJECTS)
