"""/server_info, /engine_state, /reset_prefix_cache and /abort_requests, for those who hold one of `admin_keys`.

Without such keys these routes do not exist.
"""

from __future__ import annotations

import anyio
import msgspec
import orjson

from app.engine_facts import describe
from app.generation import parse
from app.routes.probes import VERSION
from app.scope import RequestScope
from app.server import Server
from engine.commands import GetSnapshot, ResetPrefixCache
from protocol.administration import AbortRequest
from protocol.errors import ApiError

ANSWER_SECONDS = 10.0  # that an engine in the middle of a step has to end it and tell what it looks like


async def server_info(server: Server, request: RequestScope) -> None:
    """GET /server_info: version, model, engine info, settings, load."""
    model = server.model
    info = {
        "version": VERSION,
        **describe(model.engine_info, server.settings),
        "vocab_size": model.engine_info.vocab_size,
        "embedding_size": model.embedding_size,
        "default_sampling_params": model.default_sampling,
        "requests_in_flight": server.num_open_requests,
        "queued_seconds": server.admission.queued_seconds,
    }
    if server.admission.wait.costs is not None:
        info["step_cost"] = msgspec.to_builtins(server.admission.wait.costs)
    await request.send_json(200, orjson.dumps(info))


async def engine_state(server: Server, request: RequestScope) -> None:
    """GET /engine_state: what each engine has to do, holds and has done lately."""
    engines = None
    with anyio.move_on_after(ANSWER_SECONDS):
        engines = await server.model.llm.query(GetSnapshot())
    if engines is None:
        raise ApiError(503, f"The engine has not ended its step in {ANSWER_SECONDS:.0f} s.")
    await request.send_json(200, msgspec.json.encode({"engines": engines}))


async def reset_prefix_cache(server: Server, request: RequestScope) -> None:
    """POST /reset_prefix_cache, for measurements that must begin cold. Raises ApiError 400 where more is asked for."""
    if request.query().get("reset_external", ["false"])[-1].lower() not in ("false", "0"):
        raise ApiError(
            400,
            "reset_external: what kv_cache_dir and kv_cache_ram keep cannot be forgotten by request; leave it out, or "
            "start with an empty kv_cache_dir.",
            param="reset_external",
        )
    server.model.llm.send(ResetPrefixCache())
    await request.send_json(200, orjson.dumps({"success": True}))


async def abort_requests(server: Server, request: RequestScope) -> None:
    """POST /abort_requests: requests of any tenant, by their ids. Unknown ids are passed over."""
    body = await parse(server, AbortRequest, request)
    aborted = server.abort(frozenset(body.request_ids), but=request)
    await request.send_json(200, orjson.dumps({"aborted": aborted}))
