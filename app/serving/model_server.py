"""One model of a server: its settings, admission, metrics and engine, and how it is loaded."""

from __future__ import annotations

import errno
import logging
import resource
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread
from pydantic import ByteSize

from app.admission.admission import Admission
from app.config.settings import MIB, Settings, SettingsError
from app.http.hypercorn import written_together
from app.http.scope import RequestScope
from app.observability.metrics import Metrics
from app.runtime import frozen_imports
from app.serving.model_policy import ModelState, PooledModel
from app.serving.server import ERROR_FRAME_SECONDS, SHUTTING_DOWN, Server, ServerPhase
from engine.errors import EngineDead
from protocol.errors import ApiError
from protocol.openai.dialect import find_model

if TYPE_CHECKING:
    from app.serving.loading import SpareEngine
    from app.serving.prompts import PromptEncoder
    from engine.frontend.async_llm import AsyncLLM
    from engine.messages import EngineReady
    from engine.transport.process_client import EngineProcess
    from gpu.checkpoint import ModelFiles
    from protocol.scoring.answers import LabelSet

logger = logging.getLogger(__name__)


class ModelServer(PooledModel):
    """One served model. `settings` are the server's with the model's own. The parts that requests of all models share
    are those of `server`.

    `model` is there while it is loaded. Its figures and its queue are made at its first request, and stay.
    """

    def __init__(self, server: Server, settings: Settings) -> None:
        super().__init__(settings.model_names[0], pinned=settings.pinned, idle_unload=settings.idle_unload)
        self.server = server
        self.settings = settings
        self.host_need = settings.kv_cache_ram * settings.data_parallel_size
        self.workload = server.workload
        self.responses = server.responses
        self.start_up = StartUp(self.name if server.settings.has_several_models else None)
        self.llm: AsyncLLM | None = None
        self.card: dict[str, Any] = {}  # the fields of its card that are known once it was loaded
        self.facts: dict[str, Any] | None = None  # of its files, for lists
        self.files: ModelFiles | None = None  # opened and not yet loaded
        self.spare: SpareEngine | None = None  # to take when it is loaded
        self.scope: anyio.CancelScope | None = None  # of `run`
        self.has_stalled = False  # its engine is ended because it makes no progress
        self._model: ServedModel | None = None

    @cached_property
    def metrics(self) -> Metrics:
        """The figures of this model; those of the whole server if it has one model."""
        shared, several = self.server.metrics, self.server.settings.has_several_models
        metrics = shared.of_model(self.name) if several else shared
        metrics.show(
            queued_seconds=lambda: self.admission.queued_seconds,
            stalled_seconds=lambda: self.seconds_without_progress,
            waiting=lambda tenant: self.admission.places.taken_by(tenant),  # noqa: PLW0108 - made when asked
            phases=() if several else ServerPhase,
            is_in=lambda phase: self.server.phase == phase,
            routing=lambda: None if self.llm is None else self.llm.routing,
            cache_config=self._cache_config,
        )
        return metrics

    @cached_property
    def admission(self) -> Admission:
        return Admission(
            self.settings,
            self.metrics.on_rejection,
            self.server.tenants.all,
            on_waited=self.metrics.on_waited,
            rates=self.server.rates,
        )

    @property
    def memory(self) -> int | None:
        """The bytes that it takes, if it is one of several and in memory."""
        if self.need is None or not self.holds_memory or not self.server.settings.has_several_models:
            return None
        return self.need + self.host_need

    @property
    def model(self) -> ServedModel:
        """The loaded model. Raises ApiError 503 if there is none."""
        if self.server.phase in (ServerPhase.READY, ServerPhase.LEAVING) and self._model is not None:
            return self._model
        if self.state is ModelState.UNLOADED and self.server.settings.has_several_models:
            raise ApiError(503, f"The model {self.name} is not loaded.", code="model_not_loaded")
        if self.server.phase in (ServerPhase.STARTING, ServerPhase.READY):
            raise ApiError(
                503,
                "The model is still being loaded; /startupz shows the progress.",
                code="model_loading",
                headers={"retry-after": "2"},
            )
        raise SHUTTING_DOWN

    def check_model_name(self, name: str | None) -> str:
        """Return the model name for the response. Raises ApiError 404 for a name that this model does not have."""
        if name is not None and self.server.settings.check_model_name:
            find_model(name, self.settings.model_names)
        return name or self.name

    def hold(self) -> None:
        """Keep the model loaded for a request that outlives its connection, until `let_go`."""
        self.in_use += 1

    def let_go(self) -> None:
        self.in_use -= 1
        self.last_used = time.monotonic()

    @property
    def seconds_without_progress(self) -> float:
        return 0.0 if self.llm is None else self.llm.seconds_without_progress()

    @property
    def is_alive(self) -> bool:
        """True if the engine runs or is being loaded. An engine that has work and makes no steps counts as dead."""
        return self.llm is None or (
            self.llm.error is None and self.seconds_without_progress < self.settings.stall_limit
        )

    @property
    def has_engine(self) -> bool:
        """True if an engine runs or the first one is being loaded; False while dead engines are restarted."""
        return self._model is None or self.llm is None or self.llm.is_available

    @property
    def running_share(self) -> float:
        """The share of all running slots that are taken."""
        stats = None if self.llm is None else self.llm.last_stats
        slots = self.settings.max_num_seqs * self.admission.wait.count_engines()
        return 0.0 if stats is None else stats.num_running / slots

    def _cache_config(self) -> dict[str, str] | None:
        """Return the labels of vLLM's metric of this name; None while the model is not loaded."""
        if self._model is None:
            return None
        return {
            "block_size": str(self._model.engine_info.block_size),
            "num_gpu_blocks": str(self._model.llm.num_blocks),
            "enable_prefix_caching": str(self.settings.enable_prefix_caching),
        }

    # --- the lifetime

    async def open(self) -> ModelFiles:
        """Find or fetch the model's files, and estimate the bytes that it needs unless they are known."""
        await to_thread.run_sync(import_engine)
        from app.serving.loading import expected_memory, open_files

        self.files = files = await to_thread.run_sync(lambda: open_files(self.settings, self.start_up.report))
        if self.need is not None:
            return files
        need, engines = expected_memory(self.settings, files), self.settings.data_parallel_size
        if (share := self.settings.memory) is not None:
            size = share // engines - need // engines
            if size < 16 * MIB:
                what = f"{need / MIB:.0f} MiB without its KV cache"
                raise SettingsError(f"memory of {self.name}: got {share.human_readable()}, and it needs {what}")
            self.settings = self.settings.model_copy(update={"kv_cache_memory": ByteSize(size)})
        self.need = share or need
        return files

    async def run(self, on_loaded: Callable[[int], None]) -> None:
        """Load the model and run its engine, until cancelled or the engine dies. Raises the error of either.

        `on_loaded` gets the bytes that the model is expected to take and, of one of several, later those that it takes.
        """
        try:
            await to_thread.run_sync(import_engine)
            from app.serving.prompts import open_prompts

            with ExitStack() as stack:
                if self.need is None:  # which changes the settings
                    await self.open()
                # A spare process loads the model while this one opens its files.
                process = None if self.spare is None else await to_thread.run_sync(self.spare.take, self.settings)
                if process is not None:
                    stack.enter_context(process)
                files, self.files = self.files or await self.open(), None
                prompts = stack.enter_context(closing(await to_thread.run_sync(open_prompts, self.settings, files)))
                await self._serve(files, prompts, process, on_loaded)
        except Exception as error:
            raise (cause := self._cause(error)) from cause.__cause__

    def _cause(self, error: BaseException) -> BaseException:
        """Return the error that ended the model, with the setting `model` named in errors of model files."""
        from gpu.checkpoint import ModelError
        from protocol.chat_template import ChatTemplateError

        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if _is_lack_of_memory(error) or _is_lack_of_memory(error.__cause__):  # of a file that cannot be mapped
            return _lack_of_memory(error)
        if not isinstance(error, ModelError | ChatTemplateError):
            return error
        if isinstance(error, ChatTemplateError) and self.settings.chat_template is not None:
            return SettingsError(f"chat_template: got {str(self.settings.chat_template)!r}. {error}")
        explained = SettingsError(f"model: got {self.settings.model!r}, which cannot be served. {error}")
        explained.__cause__ = error.__cause__
        return explained

    def _report_or_end(self, phase: str, done: int, total: int | None) -> None:
        """Report progress from the loading thread. Raises EngineDead during shutdown, which stops loading."""
        if self.server.phase is ServerPhase.STOPPING:
            raise EngineDead("the server ends before the model is loaded")
        self.start_up.report(phase, done, total)

    async def _serve(
        self,
        files: ModelFiles,
        prompts: PromptEncoder,
        process: EngineProcess | None,
        on_loaded: Callable[[int], None],
    ) -> None:
        from app.serving import loading
        from engine.frontend.async_llm import AsyncLLM

        grammars = loading.make_grammar_compiler(files)
        if self.settings.executor == "ray":
            await to_thread.run_sync(loading.join_ray)
        files = replace(files, progress=self._report_or_end)
        client = loading.make_client(self.settings, files, self.start_up.report, grammars, process)
        llm = AsyncLLM(
            client,
            files.tokenizer,
            grammars=grammars,
            observer=self.metrics,
            seed=self.settings.seed,
            together=written_together,
        )
        llm.on_step_costs = self.admission.wait.set_costs
        self.admission.wait.count_engines = lambda: llm.num_engines
        async with llm.running(), anyio.create_task_group() as task_group:
            try:
                self.llm = llm
                # The vocabulary is built while the engine loads, not by the first grammar. Nothing else waits for it.
                task_group.start_soon(to_thread.run_sync, grammars.build_tokenizer)
                engine_info = await llm.wait_ready()
                if not self.server.settings.has_several_models:
                    self.server.bodies.follow_context(engine_info.max_model_len)
                self.admission.wait.num_kv_tokens = engine_info.num_blocks * engine_info.block_size
                self._model = ServedModel(
                    llm=llm,
                    prompts=prompts,
                    files=files,
                    num_threads=loading.divide(self.settings)[0].settings.num_threads,
                    labels=await to_thread.run_sync(loading.label_set, files),
                    engine_info=engine_info,
                    default_sampling=loading.default_sampling(self.settings, files),
                    tokenizer_info=loading.tokenizer_info(files),
                    fingerprint=await to_thread.run_sync(loading.fingerprint, files, engine_info.facts.compute_form),
                )
                if self._model.labels is not None:
                    self.server.scoring_models.add(self.name)
                self.card = {
                    "root": files.name,
                    "max_model_len": engine_info.max_model_len,
                    "default_parameters": self._model.default_sampling,
                    "chat_parameters": loading.chat_parameters(self.settings),
                }
                form = engine_info.facts.compute_form
                on_loaded(need := self.need or 0)
                if self.server.settings.has_several_models:
                    await to_thread.run_sync(grammars.build_tokenizer)
                    measured = await to_thread.run_sync(loading.measured_memory, self.settings, client, form)
                    on_loaded(measured or need)
                error = await llm.wait_dead()
            finally:
                self._model = None
                if not self.server.settings.has_several_models:
                    self.server.stop()
        if not self.server.settings.has_several_models:
            await anyio.sleep(ERROR_FRAME_SECONDS)
        raise EngineDead("the engine has died while serving") from error


def _is_lack_of_memory(error: BaseException | None) -> bool:
    if isinstance(error, RuntimeError):  # of torch, for a device or for the host
        return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def _lack_of_memory(cause: BaseException) -> SettingsError:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    words = (
        "There is not enough memory to load the model. What works: a smaller kv_cache_memory, num_threads, "
        "max_num_batched_tokens or model"
    )
    if limit != resource.RLIM_INFINITY:
        words += (
            f", or more address space: this process may have {limit / 2**30:.1f} GiB (ulimit -v), and mapped "
            "files and the stacks of threads count, too"
        )
    error = SettingsError(words)
    error.__cause__ = cause
    return error


ModelHandler = Callable[[ModelServer, RequestScope], Awaitable[None]]
"""A handler of a route that needs the model of its request."""


def import_engine() -> None:
    """Import the modules that load and serve the model. Called on a thread: the server answers during the import."""
    with frozen_imports("app.serving.loading"):
        import engine.frontend.async_llm  # noqa: F401


# --------------------------------------------------------------------------------------------------------- loaded model
# What there is once the model is loaded, and the progress of loading.


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The state that exists once the model is loaded."""

    llm: AsyncLLM
    prompts: PromptEncoder
    files: ModelFiles
    num_threads: int | None  # of each engine
    labels: LabelSet | None  # of a classifier or reranker
    engine_info: EngineReady
    default_sampling: Mapping[str, float | None]  # for fields that a request does not set
    tokenizer_info: dict[str, Any]
    fingerprint: str  # of the model and its compute form


@dataclass
class StartUp:
    """The progress of loading. Written by the loading thread, read by the event loop."""

    model: str | None = None  # its name in the log, if there are several
    task: str = "Starting"
    done: int = 0
    total: int | None = None

    def report(self, phase: str, done: int, total: int | None) -> None:
        """Record the progress; a `gpu.checkpoint.Progress` callback."""
        if phase != self.task:
            logger.info("%s%s", "" if self.model is None else f"{self.model}: ", phase)
        self.task, self.done, self.total = phase, done, total
