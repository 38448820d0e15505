"""Modules that stay as long as the process, kept out of the garbage collector's way.

The server's modules consist of hundreds of thousands of objects, with torch's some 400,000. While they are imported the
collector goes over them again and again for nothing, a sixth of the time to ready; and every full collection afterwards
would take 0.1 s and more to find them alive, in which no token moves.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_imports(module: str) -> Iterator[None]:
    """For a block that imports `module` and all it needs: nothing is collected meanwhile, and what is there at its end
    is never looked at again. Does nothing if `module` was imported before, because then most of it would be garbage."""
    if module in sys.modules:
        yield
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
