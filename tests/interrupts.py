"""Ctrl-C at a moment that a test chooses."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """SIGINT comes this late, and counts only within the block."""
    is_within = True

    def interrupt(*_: object) -> None:
        if is_within:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        yield
    except KeyboardInterrupt:
        pass  # between the call's end and here
    finally:
        is_within = False
        timer.join()
        signal.signal(signal.SIGINT, before)
