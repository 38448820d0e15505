"""Ctrl-C at a moment that a test chooses."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_WITHOUT = (__file__, contextlib.__file__)


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Send SIGINT to this process after `seconds`. It interrupts only what runs within the block."""
    is_within = False

    def interrupt(_: int, frame: FrameType | None) -> None:
        # Not between the start of the timer and the block: a context manager that is interrupted there never yields.
        if is_within and frame is not None and frame.f_code.co_filename not in _WITHOUT:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        is_within = True
        yield
    except KeyboardInterrupt:
        pass  # between the call's end and here
    finally:
        is_within = False
        timer.join()
        signal.signal(signal.SIGINT, before)
