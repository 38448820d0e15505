"""The state of a running server: phase, model, engine, requests, drain.

One `Server` per application, on its event loop. Routes get its parts, or an `ApiError` while a part is missing.
"""

from __future__ import annotations

import enum
import errno
import logging
import math
import resource
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from app.admission.admission import Admission, Limit
from app.admission.tenants import Tenants
from app.config.settings import Settings, SettingsError
from app.http.hypercorn import ServerConnection
from app.http.listening import notify
from app.http.scope import Bodies, RequestScope
from app.observability.metrics import Metrics
from app.observability.tracing import Timelines, open_tracer
from app.runtime import Workload, collect_seldom, frozen_imports
from app.serving.response_store import ResponseStore
from engine.errors import EngineDead
from engine.messages import FinishReason
from protocol.body import build_models
from protocol.errors import ApiError
from protocol.openai.dialect import find_model

if TYPE_CHECKING:
    from app.serving.prompts import PromptEncoder
    from engine.frontend.async_llm import AsyncLLM
    from engine.messages import EngineReady
    from gpu.checkpoint import Embedder, ModelFiles
    from protocol.scoring.answers import LabelSet


logger = logging.getLogger(__name__)

# The time that streams have to send their last frame after the engine has died, before the process exits.
ERROR_FRAME_SECONDS = 0.5

SHUTTING_DOWN = ApiError(
    503, "The server is shutting down.", code="shutting_down", headers={"connection": "close", "retry-after": "5"}
)

ABORTED = ApiError(
    503, "The request was ended by the operator.", code="request_aborted", headers={"x-should-retry": "false"}
)


class Server:
    """State and lifetime of one application.

    `on_fatal` is called when the engine could not be loaded or has died; it must end the process.
    """

    def __init__(self, settings: Settings, on_fatal: Callable[[BaseException], None]) -> None:
        self.settings = settings
        self.tenants = Tenants(settings)
        self.bodies = Bodies(settings.max_body_bytes)
        self.metrics = Metrics(
            settings.model_names[0],
            prefix=settings.metrics_prefix,
            tenants=[tenant.name for tenant in self.tenants.all],
        )
        self.tracer = open_tracer(settings, self.metrics.on_lost_traces)
        self.phase = ServerPhase.STARTING
        self.start_up = StartUp()
        self.loaded = anyio.Event()  # set when it becomes ready for the first time
        self.admission = Admission(
            settings, self.metrics.on_rejection, self.tenants.all, on_waited=self.metrics.on_waited
        )
        self.metrics.show(
            queued_seconds=lambda: self.admission.queued_seconds,
            stalled_seconds=lambda: 0.0 if self._llm is None else self._llm.seconds_without_progress(),
            waiting=self.admission.places.taken_by,
            phases=ServerPhase,
            is_in=lambda phase: self.phase == phase,
            routing=lambda: None if self._llm is None else self._llm.routing,
            cache_config=self._cache_config,
        )
        self.timelines = Timelines(settings.timeline_size)
        self.responses = ResponseStore(settings, partial(self.metrics.on_rejection, Limit.BACKGROUND))
        self.workload = Workload()
        self._requests: set[RequestScope] = set()
        self._open_requests: set[RequestScope] = set()  # the requests that a drain waits for
        self._idle = anyio.Event()  # set when the last open request has ended, while draining
        self.task_group: TaskGroup | None = None  # set by the lifespan
        self.created = int(time.time())
        self._started = time.monotonic()
        self._on_fatal = on_fatal
        self._llm: AsyncLLM | None = None
        self._model: ServedModel | None = None

    # --- for routes

    @property
    def model(self) -> ServedModel:
        """The loaded model. Raises ApiError 503 if there is none."""
        if self.phase in (ServerPhase.READY, ServerPhase.LEAVING) and self._model is not None:
            return self._model
        if self.phase is ServerPhase.STARTING:
            raise ApiError(
                503,
                "The model is still being loaded; /startupz shows the progress.",
                code="model_loading",
                headers={"retry-after": "2"},
            )
        raise SHUTTING_DOWN

    def check_model_name(self, name: str | None) -> str:
        """Return the model name for the response. Raises ApiError 404 for a model that is not served here."""
        names = self.settings.model_names
        if name is None or not self.settings.check_model_name:
            return name or names[0]
        find_model(name, names)
        return name

    @property
    def is_alive(self) -> bool:
        """True if the engine runs or is being loaded. An engine that has work and makes no steps counts as dead."""
        if self.phase is ServerPhase.FAILED:
            return False
        if self._llm is None:
            return True
        return self._llm.error is None and self._llm.seconds_without_progress() < self.settings.stall_limit

    @property
    def has_engine(self) -> bool:
        """True if an engine runs or the first one is being loaded; False while dead engines are restarted."""
        return self._model is None or self._llm is None or self._llm.is_available

    @property
    def is_ready(self) -> bool:
        """True if at least one tenant would be admitted."""
        return self.is_serving and not self.admission.is_full

    @property
    def is_serving(self) -> bool:
        """True if requests would be admitted to an empty queue."""
        return self.phase is ServerPhase.READY and self._llm is not None and self._llm.is_available and self.is_alive

    @property
    def num_open_requests(self) -> int:
        """The number of HTTP requests that are being answered, without probes."""
        return len(self._open_requests)

    @property
    def busy_tenants(self) -> set[str]:
        """The names of the tenants that have requests here."""
        return {request.tenant.name for request in self._requests}

    @property
    def running_share(self) -> float:
        """The share of all running slots that are taken."""
        stats = None if self._llm is None else self._llm.last_stats
        slots = self.settings.max_num_seqs * self.admission.wait.count_engines()
        return 0.0 if stats is None else stats.num_running / slots

    def _cache_config(self) -> dict[str, str] | None:
        """Return the labels of vLLM's metric of this name; None before the model is loaded."""
        if self._model is None:
            return None
        return {
            "block_size": str(self._model.engine_info.block_size),
            "num_gpu_blocks": str(self._model.llm.num_blocks),
            "enable_prefix_caching": str(self.settings.enable_prefix_caching),
        }

    def longest_stalled_connection(self) -> tuple[ServerConnection, float] | None:
        """Return the longest stalled of the connections on which every request waits for the client, and since when."""
        stalled: dict[ServerConnection, float] = {}
        served: set[ServerConnection] = set()
        for request in self._requests:
            if request.connection is None:
                continue
            if (since := request.stalled_since) is None:
                served.add(request.connection)
            else:
                stalled[request.connection] = max(since, stalled.get(request.connection, since))
        waiting = [(since, connection) for connection, since in stalled.items() if connection not in served]
        if not waiting:
            return None
        since, connection = min(waiting, key=lambda pair: pair[0])
        return connection, since

    def abort(self, request_ids: Collection[str], but: RequestScope) -> int:
        """End the requests with these ids, except `but`, and return their number. Their clients get the output so far.

        An id is that of the answer's header x-request-id, or the one in its body.
        """
        ended = 0
        for request in list(self._open_requests):
            if request is but or request.follows_another:  # a follower ends with the request that it follows
                continue
            if {request.request_id, request.answer_id}.isdisjoint(request_ids):
                continue
            ended += 1
            if request.outputs is not None and self._llm is not None:
                self._llm.abort(request.outputs)
            else:
                request.end(ABORTED, FinishReason.ABORT)
        return ended

    def status(self) -> dict[str, Any]:
        """Return the body of /startupz and /readyz: phase, progress of loading, and whether the queue is full."""
        return {
            "phase": self.phase,
            "task": self.start_up.task if self.phase is ServerPhase.STARTING else None,
            "done": self.start_up.done,
            "total": self.start_up.total,
            "elapsed_seconds": round(time.monotonic() - self._started, 3),
            "queue_full": self.admission.is_full,
        }

    # --- the lifetime

    def start_soon(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run, in the application's task group, a function belonging to no connection."""
        assert self.task_group is not None
        self.task_group.start_soon(function)

    def enter(self, request: RequestScope, *, quiet: bool) -> None:
        """Count a new request. A drain waits for it, unless it is `quiet` or came after the drain began."""
        self._requests.add(request)
        if not quiet and self.phase is not ServerPhase.STOPPING:
            self._open_requests.add(request)

    def leave(self, request: RequestScope) -> None:
        """Stop counting a request that has ended."""
        self._requests.discard(request)
        self._open_requests.discard(request)
        if not self._open_requests:
            self._idle.set()

    async def drain(self, leave_port: Callable[[], Awaitable[None]] | None = None) -> None:
        """Refuse new requests, let those in flight finish within `drain_timeout`, and end the rest with an error.

        `leave_port` returns when no connection can bring a request any more; until then new requests are served.
        """
        notify("STOPPING=1")
        logger.info("Draining, requests in flight: %d", len(self._open_requests))
        with anyio.move_on_after(self.settings.drain_timeout):
            if leave_port is not None and self.phase is ServerPhase.READY:
                self.phase = ServerPhase.LEAVING
                await leave_port()
            self._stop()
            await self._until_idle()
        self._stop()
        cut = [request for request in self._open_requests if not request.follows_another]
        for request in cut:
            request.end(SHUTTING_DOWN, FinishReason.ABORT)
        with anyio.move_on_after(ERROR_FRAME_SECONDS):
            await self._until_idle()
        for request in self._open_requests:
            request.cut()
        level = logging.WARNING if cut else logging.INFO
        logger.log(level, "Drained, requests ended at drain_timeout (%g s): %d", self.settings.drain_timeout, len(cut))

    def _stop(self) -> None:
        if self.phase is not ServerPhase.FAILED:
            self.phase = ServerPhase.STOPPING

    async def _until_idle(self) -> None:
        while self._open_requests:
            self._idle = anyio.Event()
            await self._idle.wait()

    async def watch_requests(self) -> None:
        """Disconnect clients that do not read, keep silent streams alive, drop expired responses, until cancelled."""
        settings = self.settings
        timeout = min(settings.send_timeout, settings.sse_keep_alive or math.inf)
        while True:
            await anyio.sleep(min(timeout / 8, 1.0))
            now = time.monotonic()
            for request in list(self._requests):
                request.tick(now)
            self.responses.expire(now)

    async def run(self) -> None:
        """Load the model and run the engine until cancelled. Calls `on_fatal` if either fails."""
        try:
            await self._load_and_serve()
        except Exception as error:
            self.phase = ServerPhase.FAILED
            self._on_fatal(self._cause(error))

    def _cause(self, error: BaseException) -> BaseException:
        """Return the error that ended the server, with the setting `model` named in errors of model files."""
        from gpu.checkpoint import ModelError
        from protocol.chat_template import ChatTemplateError

        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if _is_lack_of_memory(error):
            return _lack_of_memory(error)
        if not isinstance(error, ModelError | ChatTemplateError):
            return error
        if isinstance(error, ChatTemplateError) and self.settings.chat_template is not None:
            return SettingsError(f"chat_template: got {str(self.settings.chat_template)!r}. {error}")
        model, works = self.settings.model, Settings.model_fields["model"].default
        advice = "" if model == works or works in str(error) else f" A value that works: {works}"
        explained = SettingsError(f"model: got {model!r}, which cannot be served. {error}{advice}")
        explained.__cause__ = error.__cause__
        return explained

    async def _load_and_serve(self) -> None:
        settings = self.settings
        await to_thread.run_sync(_import_engine)
        from app.serving.loading import open_files
        from app.serving.prompts import open_prompts

        files = await to_thread.run_sync(lambda: open_files(settings, self.start_up.report))
        prompts = await to_thread.run_sync(open_prompts, settings, files)
        with closing(prompts):
            await self._serve(files, prompts)

    def _report_or_end(self, phase: str, done: int, total: int | None) -> None:
        """Report progress from the loading thread. Raises EngineDead during shutdown, which stops loading."""
        if self.phase is ServerPhase.STOPPING:
            raise EngineDead("the server ends before the model is loaded")
        self.start_up.report(phase, done, total)

    async def _serve(self, files: ModelFiles, prompts: PromptEncoder) -> None:
        from app.serving.loading import (
            chat_parameters,
            default_sampling,
            fingerprint,
            join_ray,
            label_set,
            make_client,
            make_grammar_compiler,
            tokenizer_info,
        )
        from engine.frontend.async_llm import AsyncLLM

        grammars = make_grammar_compiler(files)
        if self.settings.executor == "ray":
            await to_thread.run_sync(join_ray)
        files = replace(files, progress=self._report_or_end)
        client = make_client(self.settings, files, self.start_up.report, grammars)
        llm = AsyncLLM(client, files.tokenizer, grammars=grammars, observer=self.metrics, seed=self.settings.seed)
        llm.on_step_costs = self.admission.wait.set_costs
        self.admission.wait.count_engines = lambda: llm.num_engines
        async with llm.running():
            try:
                self._llm = llm
                # The vocabulary is built while the engine loads, and not by the first request.
                await to_thread.run_sync(grammars.build_tokenizer)
                await to_thread.run_sync(prompts.prepare)
                await to_thread.run_sync(build_models)
                engine_info = await llm.wait_ready()
                self.bodies.follow_context(engine_info.max_model_len)
                self.admission.wait.num_kv_tokens = engine_info.num_blocks * engine_info.block_size
                self._model = ServedModel(
                    llm=llm,
                    prompts=prompts,
                    files=files,
                    root=files.name,
                    embedding_size=files.config.embedding_size,
                    embedder=files.embedder,
                    labels=await to_thread.run_sync(label_set, files),
                    engine_info=engine_info,
                    default_sampling=default_sampling(self.settings, files),
                    chat_parameters=chat_parameters(self.settings),
                    tokenizer_info=tokenizer_info(files),
                    fingerprint=await to_thread.run_sync(fingerprint, files, engine_info.facts.compute_form),
                )
                collect_seldom()
                self.phase = ServerPhase.READY
                self.loaded.set()
                logger.info("Ready after %.1f s", time.monotonic() - self._started)
                error = await llm.wait_dead()
            finally:
                self._stop()
        await anyio.sleep(ERROR_FRAME_SECONDS)
        raise EngineDead("the engine has died while serving") from error


def _is_lack_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def _lack_of_memory(cause: BaseException) -> SettingsError:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    words = "There is not enough memory to load the model. What works: a smaller kv_cache_memory, num_threads or model"
    if limit != resource.RLIM_INFINITY:
        words += (
            f", or more address space: this process may have {limit / 2**30:.1f} GiB (ulimit -v), and mapped "
            "files and the stacks of threads count, too"
        )
    error = SettingsError(words)
    error.__cause__ = cause
    return error


ServerHandler = Callable[[Server, RequestScope], Awaitable[None]]
"""A handler of a route."""


def _import_engine() -> None:
    """Import the modules that load and serve the model. Called on a thread: the server answers during the import."""
    with frozen_imports("app.serving.loading"):
        import engine.frontend.async_llm  # noqa: F401


# --------------------------------------------------------------------------------------------------------- server state
# The parts of a server's state: its phase, the loaded model, and the progress of loading.


class ServerPhase(enum.StrEnum):
    """The server's phases: STARTING → READY → STOPPING, and FAILED from any of them. In LEAVING, before STOPPING, the
    server is not ready but still serves."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The state that exists once the model is loaded."""

    llm: AsyncLLM
    prompts: PromptEncoder
    files: ModelFiles
    root: str  # the weights' own name
    embedding_size: int
    embedder: Embedder
    labels: LabelSet | None  # of a classifier or reranker
    engine_info: EngineReady
    default_sampling: Mapping[str, float | None]  # for fields that a request does not set
    chat_parameters: Mapping[str, float]  # that interactive chat clients add
    tokenizer_info: dict[str, Any]
    fingerprint: str  # of the model and its compute form


@dataclass(kw_only=True)
class StartUp:
    """The progress of loading. Written by the loading thread, read by the event loop."""

    task: str = "Starting"
    done: int = 0
    total: int | None = None

    def report(self, phase: str, done: int, total: int | None) -> None:
        """Record the progress; a `gpu.checkpoint.Progress` callback."""
        if phase != self.task:
            logger.info("%s", phase)
        self.task, self.done, self.total = phase, done, total
