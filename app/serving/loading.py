"""Engines made from settings: the only module that imports both the device side and the engine side.

`make_executor` imports numpy, and torch if it computes, on the engine's thread or in its process.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config.engine import describe, engine_config
from app.config.setting_types import is_secret
from app.config.settings import Settings, SettingsError
from app.config.sources import env_name
from app.observability.logs import bound
from app.runtime import frozen_imports
from app.serving.step_cost_file import StepCostFile
from engine.child import ForkServer
from engine.core.core import EngineCore
from engine.detokenizer import Vocabulary
from engine.errors import ConfigError
from engine.messages import SamplingParams
from engine.structured.compiler import GrammarCompiler
from engine.transport.client import EngineClient, ThreadClient
from engine.transport.data_parallel import DataParallelClient
from gpu.checkpoint import (
    EMBEDDED_CHAT,
    EMBEDDED_MODEL,
    SAMPLING_FIELDS,
    ModelError,
    ModelFiles,
    Progress,
    model_digest,
    open_model,
    weight_paths,
)
from gpu.checkpoint.config import MAX_CHAT_TEMPLATE
from gpu.host import cuda_devices, process_memory, usable_cores
from protocol.scoring.answers import LabelSet
from protocol.syntax.registry import end_tokens

if TYPE_CHECKING:
    from engine.transport.process_client import EngineProcess, ProcessClient
    from gpu.executor import UniProcExecutor
    from gpu.parallel.multiproc import MultiprocExecutor

logger = logging.getLogger(__name__)

ENGINE_MEMORY = 160 * 2**20  # bytes of an engine's process, and of its tokenizer here, besides weights and KV cache
TOKENIZER_MEMORY = 64 * 2**20  # bytes of a model's tokenizer and grammars in the server's process
STORED_SHARE = {"none": 1.0, "int8": 0.55, "int4": 0.3}  # of a file's bytes, by the setting `quantization`
LAYOUT_SETTINGS = ("tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel")
FORK_SECONDS = 5.0  # within which a fork is ready for its model; otherwise it gets it later
ENGINE_MODULE = "app.serving.engine_main"  # tests replace it by one with faults


def open_files(settings: Settings, progress: Progress | None) -> ModelFiles:
    """Find or fetch the model and read everything but its weights. Blocks. Raises ModelError, SettingsError for a
    `chat_template` that cannot be read, and ConfigError if the model cannot be divided among so many ranks, before any
    of their processes is started."""
    files = open_model(
        settings.model_source,
        cache_dir=settings.cache_dir,
        load_format=settings.load_format,
        model_impl=settings.model_impl,
        seed=settings.seed,
        progress=progress,
    )
    if settings.chat_template is not None:
        files = replace(files, chat_template=_read_template(settings.chat_template))
    if (files.config.transformers_dir or files.config.encoder) is not None and settings.has_rank_processes:
        setting = next((name for name in LAYOUT_SETTINGS[:2] if getattr(settings, name) > 1), "executor")
        hint = f"{setting}={'uni' if setting == 'executor' else 1} works"
        allowed = "an encoder, or a model that transformers computes, has one rank, in the engine"
        raise ConfigError(setting, getattr(settings, setting), allowed=allowed, hint=hint)
    if settings.num_ranks > 1:
        _check_layout(settings, files)
    return files


def expected_memory(settings: Settings, files: ModelFiles) -> int:
    """Return an estimate of the bytes that a model's engines take: weights, KV cache and what any engine needs."""
    weights = sum(path.stat().st_size for path in weight_paths(files))
    if not weights or settings.dtype == "float32":
        weights = files.num_parameters * (4 if settings.dtype == "float32" else 2)
    weights = int(weights * STORED_SHARE[settings.quantization])
    engine = weights + (settings.kv_cache_memory or 0) + settings.num_ranks * ENGINE_MEMORY
    return engine * settings.data_parallel_size


def measured_memory(settings: Settings, client: EngineClient, compute_form: str) -> int | None:
    """Return the bytes that a loaded model takes; None unless one process of its own computes it, on CPUs. Its KV cache
    counts as a whole: the system commits the pages when they are written, later."""
    pid = getattr(client, "pid", None)
    if pid is None or settings.has_rank_processes or not compute_form.startswith("cpu"):
        return None
    engine = process_memory(pid)
    return None if engine is None else engine + (settings.kv_cache_memory or 0) + TOKENIZER_MEMORY


def _read_template(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_CHAT_TEMPLATE or not path.is_file():  # reading a pipe or a device may never end
            raise ValueError(f"it is no regular file, or has more than {MAX_CHAT_TEMPLATE:,} bytes")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"chat_template: cannot read {path}: {getattr(error, 'strerror', None) or error}. What works: UTF-8 text"
        ) from error


def _check_layout(settings: Settings, files: ModelFiles) -> None:
    from gpu.checkpoint.families.table import spec_of
    from gpu.model_loader import library_for
    from gpu.runner.runner import WorkerOptions
    from gpu.sharding import Layout, check_cuts

    computes_here = settings.executor != "ray"  # on Ray's machines the ranks choose the library
    device = "cuda" if settings.device != "cpu" and cuda_devices() else "cpu"
    library = library_for(files.config, WorkerOptions(dtype=settings.dtype), device) if computes_here else None
    layout = Layout(**{name: getattr(settings, name) for name in LAYOUT_SETTINGS})
    check_cuts(spec_of(files.config), layout, gathers=library is not None)


def default_sampling(settings: Settings, files: ModelFiles) -> dict[str, float | None]:
    """Return the sampling defaults of requests: a value for every field that a model may recommend."""
    neutral = SamplingParams()
    sampling = {name: getattr(neutral, name) for name in SAMPLING_FIELDS}
    if settings.sampling_defaults == "model" and files.sampling:
        sampling |= files.sampling
        values = ", ".join(f"{name} {value}" for name, value in files.sampling.items())
        logger.info("Sampling defaults, as the model's authors recommend: %s", values)
    return sampling


def chat_parameters(settings: Settings) -> dict[str, float]:
    """Return the fields that interactive chat clients add to their requests, for `/v1/models`."""
    is_embedded = settings.model == EMBEDDED_MODEL and settings.sampling_defaults == "model"
    return dict(EMBEDDED_CHAT) if is_embedded else {}


def label_set(files: ModelFiles) -> LabelSet | None:
    """Return the labels of a classifier or reranker; None for another model. Raises `ModelError`."""
    if (scorer := files.scorer) is None:
        return None
    return LabelSet(scorer.labels, scorer.activation, scorer.token_ids(files.tokenizer), scorer.instruction)


def fingerprint(files: ModelFiles, compute_form: str) -> str:
    """Return the `system_fingerprint`, which changes when the same request with the same seed may get another answer.
    Reads parts of the weights' files."""
    given = (model_digest(files).hex(), compute_form, version("headrace"))
    return f"fp_{hashlib.sha256(repr(given).encode()).hexdigest()[:10]}"


def tokenizer_info(files: ModelFiles) -> dict[str, Any]:
    """Return the tokenizer's configuration for clients, without the names of files and folders."""
    shown = {
        key: value
        for key, value in files.tokenizer_config.items()
        if not key.endswith(("_file", "_files", "_path", "_dir")) and not key.startswith("_")
    }
    return {"tokenizer_class": "PreTrainedTokenizerFast", **files.special_tokens, **shown} | {
        "chat_template": files.chat_template
    }


def end_token_ids(files: ModelFiles) -> tuple[int, ...]:
    """Return the tokens that end an answer: the EOS tokens of the model's files, and the end tokens of the tool-call
    syntaxes that the vocabulary has as special tokens.

    Files often list only one of these, and a model that is not stopped would generate on after its call. A file may
    also name a token that the model's syntax has inside of answers, such as `<|end|>` of gpt-oss; it is left out.
    """
    added = files.tokenizer.get_added_tokens_decoder()
    special = {token.content: token_id for token_id, token in added.items() if token.special}
    ends, inner = (
        [special[token] for token in tokens if special.get(token, files.config.vocab_size) < files.config.vocab_size]
        for tokens in end_tokens(files.chat_template or "", special)
    )
    return tuple(token_id for token_id in dict.fromkeys([*files.config.eos_token_ids, *ends]) if token_id not in inner)


def make_grammar_compiler(files: ModelFiles) -> GrammarCompiler:
    """Make a model's grammar compiler, for the server and for the engine. Raises ModelError if the model has no EOS
    token."""
    if not files.config.eos_token_ids and files.config.encoder is None:
        raise ModelError(
            f"{files.name} names no EOS token, so no answer would end: eos_token_id (in a GGUF file "
            f"tokenizer.ggml.eos_token_id) must be an id below {files.config.vocab_size}."
        )
    ends = end_token_ids(files) or (0,)  # an encoder may have none, and ends nothing
    return GrammarCompiler(Vocabulary(files.tokenizer), vocab_size=files.config.vocab_size, eos_token_ids=ends)


def make_client(
    settings: Settings,
    files: ModelFiles,
    progress: Progress,
    grammars: GrammarCompiler | None = None,
    process: EngineProcess | None = None,
) -> EngineClient:
    """Make the client of the engines that the settings ask for, not yet started. Raises ConfigError.

    An engine in this process shares the server's `grammars`; one in another process has its own compiler. With
    `executor` ray, `join_ray` must have been called.
    """
    if not settings.has_engine_processes:
        return ThreadClient(core_factory(settings, files, grammars=grammars))
    if not settings.engines_start_again:
        return make_process_client(Share(settings), progress, process=process)
    size = settings.data_parallel_size
    most = settings.max_data_parallel_size or size
    # Ray divides the machines of its cluster. An engine that may lose a process is restarted, even a single one.
    shares = [Share(settings)] * most if settings.executor == "ray" else divide(settings)

    def make(index: int) -> ProcessClient:
        return make_process_client(shares[index], progress, index if most > 1 else None)

    return DataParallelClient(make, size, settings.max_num_seqs, most, stall_limit=settings.stall_limit)


def join_ray() -> None:
    """Connect this process to the Ray cluster that RAY_ADDRESS names, or that its machine is in. Blocks. Raises
    ConfigError."""
    if find_spec("ray") is None:
        hint = "pip install '.[ray]' in a clone of Headrace makes it work, or executor=mp"
        raise ConfigError("executor", "ray", allowed="Ray is not installed", hint=hint)
    from gpu.parallel.ray_ranks import join_cluster

    join_cluster()


@dataclass(frozen=True)
class Share:
    """The part of a machine that one engine gets."""

    settings: Settings
    kv_cache_share: float = 1.0  # of the host memory that a single engine would use for its KV cache
    devices: str | None = None  # the CUDA devices that it sees; None: those of this process


def divide(settings: Settings) -> list[Share]:
    """Divide the machine among the engines: equal parts of its cores, and its CUDA devices, or if there are none equal
    parts of its memory.

    Raises ConfigError for more engines than devices.
    """
    size, each = settings.data_parallel_size, settings.num_ranks
    num_threads = settings.num_threads or max(1, usable_cores() // size)
    settings = settings.model_copy(update={"num_threads": num_threads})
    devices = [] if settings.device == "cpu" else cuda_devices()
    if devices:
        setting = "tensor_parallel_size" if each > len(devices) else "data_parallel_size"
        if size * each > len(devices):
            needed = "a CUDA device of its own" if each == 1 else f"{each} CUDA devices of its own"
            raise ConfigError(
                setting,
                getattr(settings, setting),
                allowed=f"each engine needs {needed}, and {len(devices)} can be used",
                hint=f"{setting}={max(1, len(devices) // each)} works, or device=cpu",
            )
        return [Share(settings, devices=",".join(devices[i * each : (i + 1) * each])) for i in range(size)]
    return [Share(settings, 1 / size)] * size


def make_process_client(
    share: Share, progress: Progress, index: int | None = None, process: EngineProcess | None = None
) -> ProcessClient:
    """Make the client of an engine in a process, `app.serving.engine_main`, which opens the same files as this process.

    `index` is the engine's number in the log, if there are several. A `process` has begun to load the model.
    """
    # importing ZMQ would lengthen a start without engine processes by a twentieth
    from engine.transport.process_client import ProcessClient

    start = partial(_engine_process, share.devices, ends_when_stopped=share.settings.engines_start_again)
    return ProcessClient(
        start if process is None else lambda: process,
        _setup(share, index),
        on_progress=progress,
    )


def _setup(share: Share, index: int | None = None) -> dict[str, Any]:
    """Return what `app.serving.engine_main` gets."""
    setup = {"settings": share.settings.without_secrets(), "kv_cache_share": share.kv_cache_share, "index": index}
    if not share.settings.engines_start_again:  # all processes of the machine have one such clock
        setup["started"] = time.monotonic()
    return setup


def _engine_process(devices: str | None = None, *, ends_when_stopped: bool = False) -> EngineProcess:
    from engine.transport.process_client import EngineProcess

    command, environment = _engine_command(devices)
    return EngineProcess(command, environment, ends_when_stopped=ends_when_stopped)


def _engine_command(devices: str | None = None) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of an engine's process."""
    secrets = {env_name(name) for name, field in Settings.model_fields.items() if is_secret(field)}
    environment = {name: value for name, value in os.environ.items() if name not in secrets}
    environment["HF_HUB_OFFLINE"] = "1"  # what it needs is in the cache by now
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    return [sys.executable, "-m", ENGINE_MODULE], environment


class SpareEngine:
    """A process that has imported everything. Each model's engine is a fork of it, and so loads sooner."""

    def __init__(self) -> None:
        self._forks: ForkServer | None = None

    def prepare(self) -> None:
        """Start the process, unless there is one, or no memory or descriptors for it."""
        if self._forks is not None and self._forks.has_ended:
            self.close()
        if self._forks is None:
            with suppress(OSError):
                self._forks = ForkServer(*_engine_command())

    def take(self, settings: Settings) -> EngineProcess | None:
        """Return a process that begins to load this model, or None if there can be none. Blocks."""
        from zmq import ZMQError

        from engine.transport.process_client import EngineProcess

        if settings.engines_start_again or self._forks is None:
            return None
        with suppress(OSError, ZMQError):
            process = EngineProcess(self._forks).__enter__()
            process.begin(_setup(Share(settings)), FORK_SECONDS)
            return process
        return None

    def close(self) -> None:
        """End the process. Engines go on."""
        if self._forks is not None:
            self._forks.close()
            self._forks = None


def core_factory(
    settings: Settings,
    files: ModelFiles,
    kv_cache_share: float = 1.0,
    grammars: GrammarCompiler | None = None,
    *,
    measures_anew: bool = False,
    started: float | None = None,
) -> Callable[[], EngineCore]:
    """Return a function that loads the model and makes the engine's core. Call it on the thread that will run the core.

    With `measures_anew` the core ignores the kept step costs. `started`: when the load began; None: now.
    """
    begun = started or time.monotonic()

    def make_core() -> EngineCore:
        executor = make_executor(settings, files, kv_cache_share)
        logger.info("%s", executor.summary)
        limit = files.config.max_position_embeddings
        if settings.max_model_len is None and files.config.encoder is None and executor.max_model_len < limit:
            words = "Prompt and answer may have %d tokens, and not the model's %d. More: a larger kv_cache_memory"
            logger.warning(words, executor.max_model_len, limit)
        config = engine_config(settings, executor, eos_token_ids=end_token_ids(files))
        description = describe(executor, settings)
        description["kv_cache"]["num_blocks"] *= settings.data_parallel_size  # all engines have as many
        description["memory"] = expected_memory(settings, files)
        description["load_seconds"] = time.monotonic() - begun
        file = StepCostFile.of(settings, files, executor.machine, description)
        return EngineCore(
            config,
            executor,
            grammars or make_grammar_compiler(files),
            costs=None if measures_anew else file.read(),
            keep_costs=file.write,
        )

    return make_core


def import_executor() -> None:
    with frozen_imports("gpu.executor"):
        import gpu.executor
        import gpu.model_loader  # noqa: F401


def make_executor(settings: Settings, files: ModelFiles, kv_cache_share: float) -> UniProcExecutor | MultiprocExecutor:
    """Load the model onto the device that the settings ask for. Tests wrap it in an executor that fails."""
    with frozen_imports("gpu.executor"):
        from gpu.executor import load_executor
        from gpu.model_loader import import_what_computes
        from gpu.runner.runner import WorkerOptions

    names = {field.name for field in fields(WorkerOptions)} & Settings.model_fields.keys()
    options = WorkerOptions(**{name: getattr(settings, name) for name in names}, kv_cache_share=kv_cache_share)
    if settings.has_rank_processes:
        from app.serving.rank_main import RankLog
        from gpu.parallel.multiproc import MultiprocExecutor
        from gpu.sharding import Layout

        opened = {"model": settings.model_source, "load_format": settings.load_format, "seed": settings.seed}
        cache_dir = None if settings.cache_dir is None else str(settings.cache_dir)
        executor: type[MultiprocExecutor] = MultiprocExecutor
        sizes = {name: getattr(settings, name) for name in LAYOUT_SETTINGS}
        if settings.executor == "ray":
            join_ray()
            from gpu.parallel.ray_ranks import RayExecutor

            executor = RayExecutor
        log = RankLog(settings.log_level, settings.log_format, bound())
        return executor(
            {**opened, "cache_dir": cache_dir},
            options,
            Layout(**sizes),
            files.progress,
            hidden_size=files.config.hidden_size,
            module=RankLog.__module__,
            log=asdict(log),
        )
    with frozen_imports("torch"):
        import_what_computes(files.config, options)
    return load_executor(files, options)
