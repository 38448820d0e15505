"""State of server and engine, prefix cache, aborts, profiles and log level, for those who hold one of `admin_keys`.

Without such keys these routes do not exist.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import anyio
import msgspec
import orjson

from app.engine_facts import describe
from app.generation import parse
from app.logs import change_level
from app.routes.probes import VERSION
from app.scope import RequestScope
from app.server import Server
from app.server_state import Phase
from engine.commands import GetSnapshot, Profile, ResetPrefixCache, SetLogLevel, StartProfile, StopProfile
from protocol.administration import AbortRequest, ConfigureLogging
from protocol.errors import ApiError

T = TypeVar("T")

PROFILED_STEPS, MOST_PROFILED_STEPS = 100, 1000
ANSWER_SECONDS = 10.0  # that an engine in the middle of a step has to end it and tell what it looks like


async def server_info(server: Server, request: RequestScope) -> None:
    """GET /server_info: version, model, engine info, settings, load."""
    model = server.model
    info = {
        "version": VERSION,
        **describe(model.engine_info, server.settings),
        "vocab_size": model.engine_info.vocab_size,
        "is_batch_invariant": model.engine_info.is_batch_invariant,
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
    engines = await _in_time(server.model.llm.query(GetSnapshot()))
    await request.send_json(200, msgspec.json.encode({"engines": engines}))


async def _in_time(answers: Awaitable[T]) -> T:
    with anyio.move_on_after(ANSWER_SECONDS):
        return await answers
    raise ApiError(503, f"The engine has not ended its step in {ANSWER_SECONDS:.0f} s.")


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


async def start_profile(server: Server, request: RequestScope) -> None:
    """POST /start_profile?num_steps=100: record what each engine does in its next steps. Whatever body comes is passed
    over: benchmarks of other servers send their first prompt. Raises ApiError 400 for another number of steps."""
    given = request.query().get("num_steps", [str(PROFILED_STEPS)])[-1]
    num_steps = int(given) if given.isascii() and given.isdecimal() and len(given) < 9 else 0
    if not 1 <= num_steps <= MOST_PROFILED_STEPS:
        raise ApiError(
            400,
            f"num_steps: got {given[:32]!r}; allowed: 1 to {MOST_PROFILED_STEPS}, or leave it out",
            param="num_steps",
        )
    await _in_time(server.model.llm.query(StartProfile(num_steps)))
    await request.send_json(200, orjson.dumps({"success": True}))


async def stop_profile(server: Server, request: RequestScope) -> None:
    """POST /stop_profile: what was recorded since, as a Chrome trace. Raises ApiError 409 if that is nothing or too
    much."""
    profiles = await _in_time(server.model.llm.query(StopProfile()))
    if not any(profile.num_steps for profile in profiles.values()):
        raise ApiError(409, "No step was recorded: POST /start_profile, let the server work, and stop then.")
    if any(profile.is_too_large for profile in profiles.values()):
        raise ApiError(409, "What was recorded is too much for an answer, and dropped: record fewer steps.")
    await request.send_json(200, await anyio.to_thread.run_sync(_as_trace, profiles))


def _as_trace(profiles: Mapping[int, Profile]) -> bytes:
    """One trace of all engines, each a process of its own."""
    events: list[dict[str, Any]] = []
    for engine, profile in profiles.items():
        events += (event | {"pid": engine} for event in orjson.loads(profile.events))
        events.append({"name": "process_name", "ph": "M", "pid": engine, "args": {"name": f"engine {engine}"}})
    return orjson.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


async def configure_logging(server: Server, request: RequestScope) -> None:
    """POST /configure_logging: the server logs from another severity on, until it ends."""
    body = await parse(server, ConfigureLogging, request)
    change_level(body.log_level)
    if server.phase is Phase.READY:
        server.model.llm.send(SetLogLevel(body.log_level))
    await request.send_json(200, orjson.dumps({"log_level": body.log_level}))
