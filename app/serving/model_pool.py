"""The models of a server. With one, it is loaded at the start and stays; several are loaded for their requests.

`app.serving.model_policy` decides which of several are in memory. Each of these has engines in processes of their own,
so unloading it ends them, and an engine that dies takes only the requests of its model.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
from anyio import to_thread
from pydantic import ByteSize

from app.admission.tenants import ANONYMOUS, Tenant
from app.config.settings import Settings, SettingsError
from app.config.several import settings_of_models
from app.http.scope import RequestScope
from app.observability.logs import log_ready
from app.serving.model_policy import Changes, ModelPolicy, ModelState, Waiter
from app.serving.model_server import ModelHandler, ModelServer, ServedModel, import_engine
from app.serving.server import Server, ServerPhase
from engine.errors import HeadraceError
from gpu.host import total_memory
from protocol.body import decode_json
from protocol.errors import ApiError
from protocol.openai.dialect import find_model, unknown_model

if TYPE_CHECKING:
    from app.serving.loading import SpareEngine

logger = logging.getLogger(__name__)

MEMORY_SHARE = 0.8  # of the machine or cgroup, unless the setting `memory` is given
FOLDER_SECONDS = 5.0  # least time between two readings of `models_dir`
CHECK_SECONDS = 0.25  # between two checks for turns and idle times that are over

PoolHandler = Callable[["ModelPool", RequestScope], Any]
"""A handler of a route that needs all models."""


class Asked(msgspec.Struct):
    """The fields of a body that are needed before its model is loaded. They are validated later, with the others."""

    model: Any = None
    name: Any = None  # Ollama's older name of it
    stream: Any = None
    timeout: Any = None
    ttft_timeout: Any = None
    background: Any = None


_ASKED = msgspec.json.Decoder(Asked)


def memory_limit(settings: Settings) -> int:
    """Return the bytes that several models may take together."""
    return settings.memory or int(MEMORY_SHARE * total_memory())


class ModelPool:
    """All models of one server. `on_fatal` is called when the only model, or a pinned one at the start, could not be
    loaded, and when the only engine has died; it must end the process."""

    def __init__(self, server: Server, on_fatal: Callable[[BaseException], None]) -> None:
        self.server = server
        self.settings = server.settings
        self._on_fatal = on_fatal
        self.only: ModelServer | None = None
        self._spare: SpareEngine | None = None
        self.asleep: set[ModelServer] = set()  # models that /sleep has unloaded
        self._read_at = time.monotonic()
        self.policy: ModelPolicy[ModelServer] = ModelPolicy(memory_limit(self.settings), MEMORY_SHARE * total_memory())
        if self.settings.has_several_models:
            self._take(settings_of_models(self.settings))
            server.metrics.show(
                queued_seconds=lambda: 0.0,
                stalled_seconds=lambda: 0.0,
                waiting=lambda tenant: sum(each.admission.places.taken_by(tenant) for each in self.active),
                phases=ServerPhase,
                is_in=lambda phase: server.phase == phase,
            )
        else:
            for name in ("memory", "pinned", "idle_unload"):
                if name in self.settings.model_fields_set:
                    raise SettingsError(f"{name} is for a server of several models. What works: models, or no {name}")
            self.only = ModelServer(server, self.settings)
            self.policy.models[self.only.name] = self.only
            _ = self.only.admission
        self.check_tenants()

    def check_tenants(self) -> None:
        """Warn of names in tenants' `models` that are not served."""
        served = self.names()
        for tenant in self.server.tenants.all:
            if unknown := ", ".join(sorted(set(tenant.models or ()).difference(served))):
                message = "api_keys_file: models of tenants.%s names %s, not served here. Served are %s"
                logger.warning(message, tenant.name, unknown, ", ".join(served))

    def _take(self, found: Iterable[Settings]) -> None:
        """Serve the models of these settings. Drop the others, unless they are in memory or requests wait for them."""
        models = {settings.model_names[0]: settings for settings in found}
        stays = {each for each in self.models if each.holds_memory or self.policy.is_wanted(each)}
        kept = {name: each for name, each in self.policy.models.items() if name in models or each in stays}
        self.policy.models = {
            name: kept.get(name) or ModelServer(self.server, settings) for name, settings in models.items()
        } | {name: each for name, each in kept.items() if name not in models}

    # --- for routes

    @property
    def models(self) -> list[ModelServer]:
        return list(self.policy.models.values())

    @property
    def active(self) -> list[ModelServer]:
        """The models that have had a request, or the only one."""
        return [each for each in self.models if "admission" in vars(each)]

    def models_of(self, tenant: Tenant) -> list[ModelServer]:
        """Return the models that a tenant may use."""
        return [each for each in self.models if tenant.may_use(each.settings.model_names)]

    def names(self, tenant: Tenant = ANONYMOUS) -> list[str]:
        """Return all names that a tenant may ask for."""
        return [name for each in self.models_of(tenant) for name in each.settings.model_names]

    @property
    def current(self) -> ModelServer:
        """The only model, or the loaded one that was used last. Raises ApiError 503 if none is loaded."""
        if self.only is not None:
            return self.only
        loaded = [each for each in self.models if each.state is ModelState.LOADED]
        if not loaded:
            raise ApiError(503, "No model is loaded. A request to a model loads it.", code="model_not_loaded")
        return max(loaded, key=lambda each: (each.in_use > 0, each.last_used))

    @property
    def model(self) -> ServedModel:
        return self.current.model

    def find(self, name: str | None, tenant: Tenant = ANONYMOUS) -> ModelServer:
        """Return the model of this name that a tenant may use; without a name the first one. Raises ApiError 404."""
        models, names = self.models_of(tenant), self.names(tenant)
        if name is not None and (self.settings.check_model_name or name in names):
            name = find_model(name, names)
            return next(each for each in models if name in each.settings.model_names)
        if not models:
            raise unknown_model(name or "", names)
        return models[0]

    @property
    def is_alive(self) -> bool:
        """True unless the server has failed, or has one engine that has ended or makes no steps."""
        return self.server.phase is not ServerPhase.FAILED and (self.only is None or self.only.is_alive)

    @property
    def is_ready(self) -> bool:
        """True if at least one tenant would be admitted."""
        return self.is_serving and not self.is_full

    @property
    def is_full(self) -> bool:
        active = self.active
        return bool(active) and all(each.admission.is_full for each in active)

    @property
    def is_serving(self) -> bool:
        """True if requests would be admitted to an empty queue."""
        is_available = self.only is None or (self.only.llm is not None and self.only.llm.is_available)
        return self.server.phase is ServerPhase.READY and is_available and self.is_alive

    def status(self) -> dict[str, Any]:
        """Return the body of /startupz and /readyz: phase, progress of loading, whether the queue is full. Anyone may
        read it, so it has the number of models in each state, and no names."""
        loading = (each for each in self.models if each.state is ModelState.LOADING)
        model = self.only or next(loading, None)
        is_loading = self.server.phase is ServerPhase.STARTING or (self.only is None and model is not None)
        several = {
            "memory": {"limit": self.policy.limit, "used": self.policy.used},
            "models": dict(Counter(each.state.value for each in self.models)),
        }
        return {
            "phase": self.server.phase,
            "task": model.start_up.task if model is not None and is_loading else None,
            "done": 0 if model is None else model.start_up.done,
            "total": None if model is None else model.start_up.total,
            "elapsed_seconds": round(time.monotonic() - self.server.started, 3),
            "queue_full": self.is_full,
        } | ({} if self.only is not None else several)

    async def refresh(self, *, now: bool = False) -> None:
        """Read `models_dir` again if `FOLDER_SECONDS` have passed since the last time, or if `now` is set."""
        if self.settings.models_dir is None or not (now or time.monotonic() >= self._read_at + FOLDER_SECONDS):
            return
        self._read_at = time.monotonic()
        try:
            self._take(await to_thread.run_sync(settings_of_models, self.settings))
        except SettingsError as error:
            logger.error("The models stay as they were. %s", error)

    # --- requests

    async def answer(self, handler: ModelHandler, request: RequestScope, *, streams: bool = False) -> None:
        """Load the model that the request's body names, and run a handler with it."""
        if self.only is not None:
            await handler(self.find(None, request.tenant), request)
            return
        asked = await self.server.workload.read(request, lambda: _asked(request.body))
        name = asked.name if asked.model is None and request.path.startswith("/api/") else asked.model
        if name is not None and not isinstance(name, str):
            raise ApiError(400, "model must be a string, one of the names in GET /v1/models.", param="model")
        model = self.find(name or None, request.tenant)
        async with self.use(model, request, asked, streams=streams):
            await handler(model, request)

    def in_query(self, request: RequestScope) -> ModelServer | None:
        """Return the model that the query names; None if it names none. Raises ApiError 404."""
        name = request.query().get("model", [None])[-1]
        return None if name is None else self.find(name, request.tenant)

    async def answer_query(self, handler: ModelHandler, request: RequestScope) -> None:
        """Run a handler with the model in the query, or with `current`, without loading it."""
        model = self.in_query(request) or self.current
        if model not in self.models_of(request.tenant):
            raise unknown_model(model.name, self.names(request.tenant))
        request.model = model.name
        await handler(model, request)

    @asynccontextmanager
    async def use(
        self, model: ModelServer, request: RequestScope, asked: Asked | None = None, *, streams: bool = False
    ) -> AsyncIterator[None]:
        """Load a model within the request's deadline and `max_queue_time`, and keep it loaded during the block. With
        `streams`, a streamed answer begins with comments if the load takes longer than `sse_keep_alive`.

        Raises ApiError 503 if it cannot be loaded in time, or at all.
        """
        request.model = model.name
        if self.only is not None:
            yield
            return
        asked = asked or Asked()
        deadline = self._deadline(model, request, asked)
        for_room = request.arrival_time + (model.settings.max_queue_time or math.inf)
        waiter = self.policy.enter(model, time.monotonic(), min(deadline, for_room), is_row=request.is_batch)
        try:
            if not waiter.is_admitted:
                streams = streams and asked.stream is True and not asked.background
                await self._wait(waiter, deadline, partial(self._begin_stream, request) if streams else None)
                model.metrics.on_load_wait(time.monotonic() - waiter.since)
            yield
        finally:
            self.policy.leave(waiter, time.monotonic())
            self._replan()

    @staticmethod
    def _deadline(model: ModelServer, request: RequestScope, asked: Asked) -> float:
        """Return the earliest of the deadlines that the request and the settings set."""
        settings = model.settings
        given = [asked.timeout, asked.ttft_timeout, settings.default_timeout, settings.default_ttft_timeout]
        given.append(_number(request.headers.get("x-request-timeout")))
        seconds = [each for each in given if isinstance(each, int | float) and each > 0]
        return request.arrival_time + min([*seconds, settings.max_timeout])

    async def _wait(
        self, waiter: Waiter[ModelServer], deadline: float, begin: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Wait until the model is loaded; call `begin` after `sse_keep_alive` seconds. Raises ApiError 503."""
        model, woken = waiter.model, anyio.Event()
        waiter.wake = woken.set
        if model.state is ModelState.FAILED and time.monotonic() < model.retry_at:
            raise self._failure(model)
        logger.debug("%s: a request waits for the model", model.name)
        if model.need is None and model.scope is None:
            self._start(self._measure, model)
        self._replan()
        every = self.settings.sse_keep_alive
        begin_at = time.monotonic() + every if begin is not None and every else math.inf
        # `max_queue_time` limits only the wait for memory. During the load, the request's deadline limits the wait.
        for latest in (waiter.until, deadline):
            while not woken.is_set() and (now := time.monotonic()) < latest:
                with anyio.move_on_after(min(latest, begin_at) - now):
                    await woken.wait()
                if begin is not None and not woken.is_set() and time.monotonic() >= begin_at:
                    begin_at = math.inf
                    await begin()
            if model.state is not ModelState.LOADING:
                break
        if waiter.error is not None:
            raise waiter.error if isinstance(waiter.error, ApiError) else self._failure(model)
        if not waiter.is_admitted:
            raise self._lack_of_room(model)

    async def _begin_stream(self, request: RequestScope) -> None:
        """Begin the answer of a request that still waits for its model, with a comment."""
        dialect = request.dialect
        if dialect.error_event is not None:
            keep_alive = self.settings.sse_keep_alive, dialect.keep_alive
            await request.start_stream(dialect.stream_type, error_frame=request.error_event, keep_alive=keep_alive)
            await request.send_chunk(dialect.keep_alive)

    def _failure(self, model: ModelServer) -> ApiError:
        pause = {"retry-after": str(max(1, math.ceil(model.retry_at - time.monotonic())))}
        source = Path(model.settings.model_source)
        # Do not show clients the folder of the models.
        why = str(model.error).replace(f"{source.parent}/" if source.is_absolute() else "\0", "")
        words = f"The model {model.name} could not be loaded, or its engine ended: {why}"
        return ApiError(503, words, code="model_failed", headers=pause)

    def _lack_of_room(self, model: ModelServer) -> ApiError:
        others = ", ".join(
            f"{each.name} ({_size(each.need or 0)}, {'pinned' if each.pinned else f'{each.in_use} requests'})"
            for each in self.policy.in_the_way_of(model)
        )
        need = "" if model.need is None else f" It needs {_size(model.need)} of {_size(self.policy.limit)}."
        words = f"The model {model.name} could not be loaded in time.{need} In memory: {others or 'no other model'}."
        return ApiError(503, words, code="model_not_loaded", headers={"retry-after": "5"})

    def _too_large(self, model: ModelServer) -> ApiError:
        pinned = ", ".join(each.name for each in self.policy.in_the_way_of(model) if each.pinned)
        others = f", of which pinned models ({pinned}) keep theirs" if pinned else ""
        if model.host_need:
            of_host = _size(int(self.policy.host_limit))
            others += f"; its kv_cache_ram is {_size(model.host_need)} of the host's memory, and may be {of_host}"
        return ApiError(
            503,
            f"The model {model.name} does not fit: it needs {_size(model.need or 0)} for weights, KV cache and "
            f"engine, and the models may take {_size(self.policy.limit)} together{others}. What works: a larger "
            "setting memory, a smaller kv_cache_memory, or a smaller model.",
            code="model_too_large",
            headers={"x-should-retry": "false"},
        )

    # --- the lifetime

    async def run(self) -> None:
        """Load the only model or the pinned ones, and serve until cancelled."""
        server = self.server
        try:
            if self.only is not None:
                await self.only.run(partial(self._is_loaded, self.only, server.started))
                return
            await to_thread.run_sync(import_engine)
            from app.serving.loading import SpareEngine

            spare = self._spare = SpareEngine()
            spare.prepare()
            await self._load_pinned()
        except Exception as error:
            server.phase = ServerPhase.FAILED
            self._on_fatal(error)
            return
        self._is_serving()
        try:
            while True:
                await anyio.sleep(CHECK_SECONDS)
                self._look()
        finally:
            spare.close()

    def _look(self) -> None:
        """Act on turns and idle times that are over, and on engines that make no progress."""
        self._replan()
        for model in self.models:
            if model.state is ModelState.LOADED and not model.is_alive and model.scope is not None:
                model.state, model.has_stalled = ModelState.UNLOADING, True  # loaded again when its engine has ended
                model.scope.cancel()
        is_loading = any(each.state is ModelState.LOADING for each in self.models)
        if self._spare is not None and not is_loading and any(not each.holds_memory for each in self.models):
            self._spare.prepare()

    def _is_loaded(self, model: ModelServer, started: float, need: int) -> None:
        """Let the requests of a loaded model go on. Called again when its memory is measured."""
        if self.only is None and model.state is ModelState.LOADED:
            model.need = need
            model.metrics.on_memory(need + model.host_need)
            takes = _size(need + model.host_need)
            logger.info("%s: loaded in %.2f s, takes %s", model.name, model.load_seconds, takes)
            self._replan()
            return
        if self.only is None and model.state is not ModelState.LOADING:
            return  # it was unloaded during the load
        now = time.monotonic()
        self.policy.loaded(model, now, need, now - started)
        model.metrics.on_load(need + model.host_need)
        if model is self.only:
            self._is_serving()
            return
        self._replan()

    def _is_serving(self) -> None:
        self.server.phase = ServerPhase.READY
        self.server.loaded.set()
        log_ready(time.monotonic() - self.server.started)

    async def _load_pinned(self) -> None:
        """Load the pinned models. Raises the error of the first that cannot be loaded."""
        for model in self.models:
            if model.pinned:
                waiter = self.policy.enter(model, time.monotonic(), math.inf)
                try:
                    if not waiter.is_admitted:
                        await self._wait(waiter, math.inf)
                except ApiError as error:
                    raise model.error or SettingsError(error.message) from None
                finally:
                    self.policy.leave(waiter, time.monotonic())

    async def unload(self, models: Iterable[ModelServer]) -> None:
        """Unload models, and wait for it. Raises ApiError 409 for one that has requests, and for the only one."""
        changes: Changes[ModelServer] = Changes()
        models = list(models)
        try:
            for model in models:
                if self.only is not None:
                    raise ApiError(409, "This server has one model, which stays loaded.", code="model_stays")
                is_there = model.state in (ModelState.LOADING, ModelState.LOADED)
                if is_there and not self.policy.unload(model, changes):
                    why = f"has {model.in_use} requests" if model.in_use else "is being loaded"
                    raise ApiError(409, f"The model {model.name} {why}. Try again later.", code="model_in_use")
        finally:
            self._carry_out(changes)  # also after an error: unload the models before the one that cannot be unloaded
        while any(model.state is ModelState.UNLOADING for model in models):  # noqa: ASYNC110 - it is short
            await anyio.sleep(0.01)

    def _start(self, function: Callable[[ModelServer], Any], model: ModelServer) -> None:
        model.scope = anyio.CancelScope()
        self.server.start_soon(partial(function, model))

    async def _measure(self, model: ModelServer) -> None:
        """Open the files of a model to estimate its memory before loading it."""
        try:
            await model.open()
        except Exception as error:
            self._has_failed(model, error)
        model.scope = None
        self._replan()

    def _replan(self) -> None:
        if self.only is not None or self.server.phase not in (ServerPhase.STARTING, ServerPhase.READY):
            return
        for waiter in list(self.policy.waiting):
            if self.policy.is_impossible(waiter.model):
                waiter.model.files = None
                self.policy.refuse(waiter.model, self._too_large(waiter.model))
        self._carry_out(self.policy.plan(time.monotonic()))

    def _carry_out(self, changes: Changes[ModelServer]) -> None:
        for model in changes.unload:
            logger.info("%s: unloading", model.name)
            if model.scope is not None:
                model.scope.cancel()
        for model in changes.load:
            self._start(self._serve, model)

    async def _serve(self, model: ModelServer) -> None:
        """Load a model and run it until it is unloaded or its engine dies."""
        assert model.scope is not None
        model.spare, model.has_stalled = self._spare, False
        try:
            with model.scope:
                await model.run(partial(self._is_loaded, model, time.monotonic()))
            if model.has_stalled:
                raise HeadraceError("its engine makes no progress")
        except Exception as error:
            self._has_failed(model, error)
        if model.state is not ModelState.FAILED:
            self.policy.unloaded(model)
        if model.llm is not None:
            model.metrics.on_unload()
        model.llm = model.scope = None
        gc.collect()  # the engine's tokenizer and mapped files are in cycles; about 15 ms
        self._replan()

    def _has_failed(self, model: ModelServer, error: Exception) -> None:
        logger.error("%s: %s", model.name, error, exc_info=None if isinstance(error, HeadraceError) else error)
        self.policy.failed(model, time.monotonic(), error)


def _asked(body: bytes) -> Asked:
    """Return the fields of a body that matter before its model is loaded. Raises ApiError 400 if it is not an object in
    JSON."""
    if not body.strip():
        return Asked()
    try:
        return _ASKED.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        decode_json(body)  # raises a clearer error
        return Asked()


def _size(num_bytes: int) -> str:
    return ByteSize(num_bytes).human_readable()


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
