"""Probes, models, timelines and administration.

The administration's routes exist only if there are `admin_keys`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from importlib import metadata
from typing import Any, TypeVar, cast

import anyio
import msgspec
import orjson

from app.admission.tenants import ANONYMOUS
from app.config.engine import describe
from app.http.scope import RequestScope
from app.observability.logs import change_level
from app.observability.metrics import CONTENT_TYPE
from app.serving.model_policy import ModelState
from app.serving.model_pool import ModelPool
from app.serving.model_server import ModelServer
from app.serving.server import Server, ServerPhase
from engine.commands import GetSnapshot, Profile, ResetPrefixCache, SetLogLevel, StartProfile, StopProfile
from protocol import answers
from protocol.answers import encode
from protocol.anthropic.dialect import ANTHROPIC, model_info, model_page
from protocol.body import parse_body
from protocol.errors import ApiError
from protocol.openai.answers import ModelCard, ModelList
from protocol.openai.dialect import find_model
from protocol.registry import AbortRequest, ConfigureLogging, ModelRequest

T = TypeVar("T")

NO_CARD: dict[str, Any] = {"root": None, "max_model_len": None, "default_parameters": {}, "chat_parameters": {}}

PROFILED_STEPS, MOST_PROFILED_STEPS = 100, 1000
ANSWER_SECONDS = 10.0  # the time that an engine has to end its step and answer


async def server_info(server: ModelServer, request: RequestScope) -> None:
    """GET /server_info: the version, model, engine info, settings and load."""
    model = server.model
    info = {
        "version": VERSION,
        **describe(model.engine_info, server.settings),
        "memory": server.need,
        "load_seconds": server.load_seconds,
        "computes": model.engine_info.facts.compute_form,
        "vocab_size": model.engine_info.vocab_size,
        "is_batch_invariant": model.engine_info.facts.is_batch_invariant,
        "embedding_size": model.files.config.embedding_size,
        "default_sampling_params": model.default_sampling,
        "tool_syntax": model.prompts.syntax.name,
        "requests_in_flight": server.server.num_open_requests,
        "queued_seconds": server.admission.queued_seconds,
    }
    stats = model.llm.last_stats
    if stats is not None and stats.checkpoints is not None:
        info["state_checkpoints"] = msgspec.structs.asdict(stats.checkpoints)
    if server.admission.wait.costs is not None:
        info["step_cost"] = msgspec.to_builtins(server.admission.wait.costs)
    await request.send_json(200, orjson.dumps(info))


async def engine_state(server: ModelServer, request: RequestScope) -> None:
    """GET /engine_state: a snapshot of each engine: requests, blocks and latest steps."""
    engines = await _in_time(server.model.llm.query(GetSnapshot()))
    await request.send_json(200, encode(answers.EngineState(cast(Any, engines))))


async def _in_time(answers: Awaitable[T]) -> T:
    with anyio.move_on_after(ANSWER_SECONDS):
        return await answers
    raise ApiError(503, f"The engine has not ended its step in {ANSWER_SECONDS:.0f} s. Try again later.")


async def reset_prefix_cache(server: ModelServer, request: RequestScope) -> None:
    """POST /reset_prefix_cache, for measurements that must begin cold. Raises ApiError 400 for `reset_external`."""
    if request.query_fields().get("reset_external", "false").lower() not in ("false", "0"):
        raise ApiError(
            400,
            "reset_external: allowed: false. The blocks in kv_cache_dir and kv_cache_ram cannot be dropped by request; "
            "start the server with an empty kv_cache_dir.",
            param="reset_external",
        )
    server.model.llm.send(ResetPrefixCache())
    await request.send_json(200, encode(answers.Success(True)))


async def abort_requests(server: Server, request: RequestScope) -> None:
    """POST /abort_requests: end requests of any tenant by their ids. Unknown ids are ignored."""
    body = await server.workload.read(request, lambda: parse_body(AbortRequest, request.body))
    aborted = server.abort(frozenset(body.request_ids), but=request)
    await request.send_json(200, encode(answers.Aborted(aborted)))


async def start_profile(server: ModelServer, request: RequestScope) -> None:
    """POST /start_profile?num_steps=100: profile the next steps of each engine. The body is ignored: benchmarks of
    other servers send their first prompt. Raises ApiError 400 for a wrong number of steps."""
    given = request.query_fields().get("num_steps", str(PROFILED_STEPS))
    num_steps = int(given) if given.isascii() and given.isdecimal() and len(given) < 9 else 0
    if not 1 <= num_steps <= MOST_PROFILED_STEPS:
        raise ApiError(
            400,
            f"num_steps: got {given[:32]!r}; allowed: 1 to {MOST_PROFILED_STEPS}, or leave it out",
            param="num_steps",
        )
    await _in_time(server.model.llm.query(StartProfile(num_steps)))
    await request.send_json(200, encode(answers.Success(True)))


async def stop_profile(server: ModelServer, request: RequestScope) -> None:
    """POST /stop_profile: the profile as a Chrome trace. Raises ApiError 409 if it is empty or too large."""
    profiles = await _in_time(server.model.llm.query(StopProfile()))
    if not any(profile.num_steps for profile in profiles.values()):
        raise ApiError(409, "No step was recorded. POST /start_profile, send requests, then POST /stop_profile.")
    if any(profile.is_too_large for profile in profiles.values()):
        raise ApiError(409, "The profile is too large for an answer and was dropped. Record fewer steps.")
    await request.send_json(200, await anyio.to_thread.run_sync(_as_trace, profiles))


def _as_trace(profiles: Mapping[int, Profile]) -> bytes:
    """Return one trace of all engines, each as a process of its own."""
    events: list[dict[str, Any]] = []
    for engine, profile in profiles.items():
        events += (event | {"pid": engine} for event in orjson.loads(profile.events))
        events.append({"name": "process_name", "ph": "M", "pid": engine, "args": {"name": f"engine {engine}"}})
    return orjson.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


async def configure_logging(pool: ModelPool, request: RequestScope) -> None:
    """POST /configure_logging: set the least severity that is logged, until the server ends."""
    body = await pool.server.workload.read(request, lambda: parse_body(ConfigureLogging, request.body))
    change_level(body.log_level)
    for model in pool.models:
        if model.llm is not None:
            model.llm.send(SetLogLevel(body.log_level))
    await request.send_json(200, encode(answers.LogLevel(body.log_level)))


async def load_model(pool: ModelPool, request: RequestScope) -> None:
    """POST /v1/models/load: load a model as a request for it would, and wait for it."""
    body = await pool.server.workload.read(request, lambda: parse_body(ModelRequest, request.body))
    model = pool.find(body.model)
    async with pool.use(model, request):
        await _send_states(request, [model])


async def unload_model(pool: ModelPool, request: RequestScope) -> None:
    """POST /v1/models/unload. Raises ApiError 409 for a model that has requests, or the only one."""
    body = await pool.server.workload.read(request, lambda: parse_body(ModelRequest, request.body))
    model = pool.find(body.model)
    await pool.unload([model])
    await _send_states(request, [model])


async def sleep(pool: ModelPool, request: RequestScope) -> None:
    """POST /sleep: unload the model of the query, or all that have no requests, until they are asked for again."""
    model = pool.in_query(request)
    idle = [each for each in pool.models if not pool.policy.is_wanted(each)]
    models = idle if model is None else [model]
    pool.asleep |= {each for each in models if each.holds_memory}
    await pool.unload(models)
    await _send_states(request, pool.models)


async def wake_up(pool: ModelPool, request: RequestScope) -> None:
    """POST /wake_up: load the model of the query, or those that /sleep has unloaded."""
    asked = pool.in_query(request)
    for model in list(pool.asleep) if asked is None else [asked]:
        async with pool.use(model, request):
            pool.asleep.discard(model)
    await _send_states(request, pool.models)


async def _send_states(request: RequestScope, models: Sequence[ModelServer]) -> None:
    await request.send_json(200, encode(answers.ModelStates({each.name: each.state.value for each in models})))


# --------------------------------------------------------------------------------------------------------------- probes
# /livez, /readyz, /startupz, /health, /ping, /load, /version and /metrics. They read only memory and compute no token.
#
# /livez     is the process worth keeping?   503 once the engine has failed, and while no engine runs
# /readyz    should it get traffic?          200 while requests are admitted; ?exclude=queue_full: with a full queue,
# too
# /startupz  is it still starting?           200 once the model is loaded; the body has the progress
# /health    vLLM's name for /readyz, with an empty body; /ping is SageMaker's, with GET and POST
# /load      the number of requests that are being answered


VERSION = metadata.version("headrace")


async def livez(pool: ModelPool, request: RequestScope) -> None:
    alive = pool.is_alive and (pool.only is None or pool.only.has_engine)
    await request.send_json(200 if alive else 503, encode(answers.Alive(alive)))


async def readyz(pool: ModelPool, request: RequestScope) -> None:
    excluded = request.query().get("exclude", [])
    if unknown := set(excluded) - {"queue_full"}:
        raise ApiError(400, f"exclude: got {min(unknown)[:32]!r}; allowed: queue_full", param="exclude")
    ready = pool.is_serving if excluded else pool.is_ready
    await request.send_json(200 if ready else 503, orjson.dumps(pool.status()))


async def startupz(pool: ModelPool, request: RequestScope) -> None:
    started = pool.server.phase not in (ServerPhase.STARTING, ServerPhase.FAILED)
    await request.send_json(200 if started else 503, orjson.dumps(pool.status()))


async def health(pool: ModelPool, request: RequestScope) -> None:
    await request.send_body(200 if pool.is_ready else 503, b"", "text/plain")


async def load(server: Server, request: RequestScope) -> None:
    await request.send_json(200, encode(answers.Load(server.num_open_requests)))


async def show_version(server: Server, request: RequestScope) -> None:
    await request.send_json(200, encode(answers.Version(VERSION)))


async def metrics(pool: ModelPool, request: RequestScope) -> None:
    by_tenant = request.tenant is ANONYMOUS or not pool.server.tenants.administered  # else the key is a client's
    await request.send_body(200, pool.server.metrics.render(by_tenant=by_tenant), CONTENT_TYPE)


# ------------------------------------------------------------------------------------------------------------ catalogue
# GET /v1/models and /v1/models/{id}: the served models, in the form of the client's dialect.


async def list_models(pool: ModelPool, request: RequestScope) -> None:
    """GET /v1/models: all served models, with their states."""
    await pool.refresh()
    models = pool.models_of(request.tenant)
    cards = [_card(pool, model, request, name) for model in models for name in model.settings.model_names]
    is_page = request.dialect is ANTHROPIC
    await request.send_json(200, model_page(cards, request.query()) if is_page else encode(ModelList(data=cards)))


async def show_model(pool: ModelPool, request: RequestScope) -> None:
    """GET /v1/models/{id}; ids may contain slashes."""
    name = find_model(request.path_params["id"], pool.names(request.tenant))
    await request.send_json(200, encode(_card(pool, pool.find(name), request, name)))


def _card(pool: ModelPool, model: ModelServer, request: RequestScope, name: str) -> Any:
    if pool.only is not None:
        _ = model.model  # raises while it is being loaded
    created = pool.server.created
    if request.dialect is ANTHROPIC:
        return model_info(name, created=created, max_model_len=model.card.get("max_model_len"))
    status = ModelState.LOADED if pool.only is not None else model.state
    return ModelCard(id=name, created=created, **NO_CARD | model.card, status=status.value, memory=model.memory)


# ------------------------------------------------------------------------------------------------------------- requests
# GET /v1/requests/{id}/timeline: the events of one of the last requests.


async def timeline(server: Server, request: RequestScope) -> None:
    """GET /v1/requests/{id}/timeline. The id is that of the answer's header x-request-id."""
    found = server.timelines.find(request.path_params["id"], request.tenant.name)
    if found is None:
        raise ApiError(
            404,
            f"There is no timeline of this request: it is unknown, still runs, or is not among the last "
            f"{server.settings.timeline_size}. The id is that of the header x-request-id in its answer.",
            param="id",
            code="request_not_found",
        )
    await request.send_json(200, found)
