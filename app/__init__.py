"""The server: command line, HTTP, admission, serving, dashboard, benchmarks and simulator.

Importing this package is cheap: it loads neither torch nor Starlette. `main` builds the application from the
environment and the settings file when an ASGI server first calls it; `headrace serve` builds it from its flags.

In reading order:

__main__       The entry point of the `headrace` command: signal handling before the slow imports.
config         Settings: their definitions, their sources, and the engine's configuration made from them.
client         A streaming HTTP/1.1 client for measurements and for the commands that talk to a server.
runtime        The event loop's helpers: worker threads for long work, lag measurement, garbage collection.
admission      Which requests may queue, by tenant, queue length and expected wait.
workload       Request workloads, results and their rendering, shared by the benchmarks and the simulator.
http           One request on the wire: its scope, its record, connections, middleware and Hypercorn.
observability  Logs, metrics, dashboard frames and traces.
serving        The running server: loading, prompts, generation, kept responses, shutdown.
library        `LLM`: a model by its name, without a server.
simulate       `headrace simulate`: the server's scheduler and admission on a virtual clock.
dashboard      The live page's feed and its simulator.
routes         The handlers of all paths.
bench          `headrace bench`: measures a server, or the model in this process.
application    Builds the ASGI application from settings: server, routes, middleware and lifespan.
ray_serve      The application on Ray Serve, with its routing and scaling policies.
commands       The terminal programs: the command line, chat, top and doctor.
"""

from __future__ import annotations

import gc
import os
import sys
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.types import Receive, Scope, Send


NEW_OBJECTS: Final = 50_000  # more allocations than deallocations until a collection; Python's default is 700


def prepare_process() -> None:
    """Set the environment variables that a server's imports read, skip unused imports, and make collections rare.

    Call this before the imports. At Python's default threshold and with 256 open streams, garbage collections take a
    tenth of the event loop's time, and each full one stops the loop for 0.1 s. They take 3 % of the start.
    """
    gc.set_threshold(NEW_OBJECTS)
    # pydantic would look for plugins in the metadata of every installed package.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # Without this, each of OpenBLAS's threads (one per core) spins for 14 ms after numpy's import and after a product.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    if "hypercorn.protocol" not in sys.modules:
        # Hypercorn would import HTTP/2 and WebSocket, which `headrace serve` does not speak. These are stand-ins.
        for module, name in (("h2", "H2Protocol"), ("ws_stream", "WSStream")):
            sys.modules[f"hypercorn.protocol.{module}"] = cast(ModuleType, SimpleNamespace(**{name: None}))


async def main(scope: Scope, receive: Receive, send: Send) -> None:
    """The ASGI application, with settings from the environment and the settings file."""
    await _application_from_environment()(scope, receive, send)


@cache
def _application_from_environment() -> Starlette:
    prepare_process()
    from app.application import create_app, end_process
    from app.config.settings import SettingsError
    from app.config.sources import load_settings
    from app.serving.process import check_socket_settings, check_workers

    try:
        check_workers()
        settings = load_settings()
        check_socket_settings(settings)
        return create_app(settings)
    except SettingsError as error:
        # The first call is the lifespan. If it raised, Hypercorn would log the exception and go on without a lifespan.
        end_process(error)
