"""The process of an engine whose device fails when it is told to: `app.serving.engine_main` behind
`tests.integration.chaos.faulty`."""

from __future__ import annotations

import tests.integration.chaos.faulty  # noqa: F401  (puts the faults in front of the executor)
from app.serving.engine_main import build
from engine.transport.process_core import serve_parent

if __name__ == "__main__":
    serve_parent(build)
