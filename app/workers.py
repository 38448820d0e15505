"""Refuses `hypercorn --workers 2 app:main`, which would be two servers that take turns at answering.

Each worker would load its own model and keep its own responses, places in the queue and prefix cache: half of the
responses would not be found, and no limit would hold. Hypercorn tells an application nothing about its workers, but a
worker is a process that was handed Hypercorn's configuration.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

from app.settings import SettingsError

_TIMEOUT = 10.0  # seconds for all workers to have started


def check_workers() -> None:
    """Raise `SettingsError` if Hypercorn has been told to start more than one worker."""
    process: Any = multiprocessing.current_process()
    parent = multiprocessing.parent_process()
    config = getattr(process, "_kwargs", {}).get("config")
    workers = getattr(config, "workers", 1)
    if parent is None or workers <= 1:
        return
    # The last one says it, because a worker that is still starting when its parent ends would have a traceback as the
    # log's last words. The others end with their parent.
    if process._identity[-1] < workers:
        parent.join(_TIMEOUT)
        if not parent.is_alive():
            os._exit(1)
    raise SettingsError(
        f"workers: got {workers}, but one process serves one model: each worker would load the model again, and know "
        "nothing of the others' responses and limits. A value that works: hypercorn --workers 1 app:main. For more "
        "engines in one server, set data_parallel_size"
    )
