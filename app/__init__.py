"""The server that `hypercorn app:main` loads: routes, the request scope, settings, command line and lifespan.

Importing this package is cheap on purpose: no torch, no starlette. `main` builds the application when the server first
calls it, from the settings in the environment and the settings file; `headrace serve` builds one from its flags.

Reading order: `settings`, `application`, `scope`, `middleware`, `server`, `loading`, `routes`, `events`; then `logs`,
`metrics`, `tracing`, `cli`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.types import Receive, Scope, Send


async def main(scope: Scope, receive: Receive, send: Send) -> None:
    """The ASGI application, with settings from the environment and the settings file."""
    await _application_from_environment()(scope, receive, send)


@cache
def _application_from_environment() -> Starlette:
    from app.application import create_app, end_process
    from app.settings import SettingsError, load_settings
    from app.workers import check_workers

    try:
        check_workers()
        return create_app(load_settings())
    except SettingsError as error:
        # The server's first call is the lifespan, where Hypercorn would log an exception and serve on without one.
        end_process(error)
