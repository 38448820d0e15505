"""The main module of an engine's process, started by `app.serving.loading.make_process_client`.

The server sends it the settings, without secrets; the process reads none by itself.
"""

from __future__ import annotations

import time
from typing import Any

from app.config.settings import Settings
from app.observability.logs import bind, configure_logging
from app.serving.loading import core_factory, import_executor, open_files
from engine.core.core import EngineCore
from engine.transport.process_core import serve_parent
from engine.transport.wire import Report


def build(setup: dict[str, Any], report: Report) -> EngineCore:
    """Load the model, which the server has opened already."""
    started = setup.get("started", time.monotonic())
    settings = Settings(**setup["settings"])
    configure_logging(settings)
    if setup["index"] is not None:
        bind(engine=setup["index"])
    return core_factory(settings, open_files(settings, report), setup["kv_cache_share"], started=started)()


if __name__ == "__main__":
    import_executor()  # before forks are made, and before the setup comes
    serve_parent(build)
