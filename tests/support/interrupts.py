"""Ctrl-C at a moment that a test chooses."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable


def call_and_interrupt(function: Callable[[], object], seconds: float) -> tuple[bool, bool]:
    """Call it, with a SIGINT that comes this late. Returns whether the signal came before the call's end, and whether
    the call was interrupted."""
    is_within = came = was_interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal came
        if is_within:
            came = True
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        try:
            is_within = True
            function()
            is_within = False
        except KeyboardInterrupt:
            is_within, was_interrupted = False, True
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    return came, was_interrupted
