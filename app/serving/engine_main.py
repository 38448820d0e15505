"""What runs in the engine's process: `python -m app.serving.engine_main`, started by
`app.serving.loading.make_process_client`.

It gets its settings from the server that started it, without secrets, and reads none by itself.
"""

from __future__ import annotations

from typing import Any

from app.config.settings import Settings
from app.observability.logs import bind, configure_logging
from app.serving.loading import core_factory, open_files
from engine.core.core import EngineCore
from engine.transport.process_core import serve_parent
from engine.transport.wire import Report


def build(setup: dict[str, Any], report: Report) -> EngineCore:
    """Load the model that the server has opened already."""
    settings = Settings(**setup["settings"])
    configure_logging(settings)
    if setup["index"] is not None:
        bind(engine=setup["index"])
    return core_factory(settings, open_files(settings, report), setup["kv_cache_share"])()


if __name__ == "__main__":
    serve_parent(build)
