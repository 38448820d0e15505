"""/livez, /readyz, /startupz, /health, /ping, /load, /version and /metrics. They cost no token and touch nothing but
memory.

/livez     is the process worth keeping?   503 once the engine has failed, and while no engine runs
/readyz    should it get traffic?          200 while tokens can be made; ?exclude=queue_full: with a full queue, too
/startupz  is it still starting?           200 once the model is loaded; the body says how far it is
/health    vLLM's name for /readyz, with an empty body; /ping is SageMaker's, with GET and POST
/load      how many requests are being answered
"""

from __future__ import annotations

from importlib import metadata

import orjson

from app.metrics import CONTENT_TYPE
from app.scope import RequestScope
from app.server import Server
from app.server_state import Phase
from app.tenants import ANONYMOUS
from protocol.errors import ApiError

VERSION = metadata.version("headrace")


async def livez(server: Server, request: RequestScope) -> None:
    alive = server.is_alive and server.has_engine
    await request.send_json(200 if alive else 503, orjson.dumps({"alive": alive}))


async def readyz(server: Server, request: RequestScope) -> None:
    excluded = request.query().get("exclude", [])
    if unknown := set(excluded) - {"queue_full"}:
        raise ApiError(400, f"exclude: got {min(unknown)[:32]!r}; allowed: queue_full", param="exclude")
    ready = server.is_serving if excluded else server.is_ready
    await request.send_json(200 if ready else 503, orjson.dumps(server.status()))


async def startupz(server: Server, request: RequestScope) -> None:
    started = server.phase not in (Phase.STARTING, Phase.FAILED)
    await request.send_json(200 if started else 503, orjson.dumps(server.status()))


async def health(server: Server, request: RequestScope) -> None:
    await request.send_body(200 if server.is_ready else 503, b"", "text/plain")


async def load(server: Server, request: RequestScope) -> None:
    await request.send_json(200, orjson.dumps({"server_load": server.num_open_requests}))


async def show_version(server: Server, request: RequestScope) -> None:
    await request.send_json(200, orjson.dumps({"version": VERSION}))


async def metrics(server: Server, request: RequestScope) -> None:
    by_tenant = request.tenant is ANONYMOUS or not server.tenants.administered  # else it is a client who asks
    await request.send_body(200, server.metrics.render(by_tenant=by_tenant), CONTENT_TYPE)
