"""From settings to an engine: the only place that knows both the gpu room and the engine room.

Torch is imported by `make_executor`, on the engine's thread; everything before it is torch-free.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from app.settings import Settings
from engine.client import EngineClient, ThreadClient
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.llm import LLM
from gpu.weights import ModelFiles, Progress, open_model

if TYPE_CHECKING:
    from gpu.executor import UniProcExecutor

logger = logging.getLogger(__name__)


def open_files(settings: Settings, progress: Progress | None) -> ModelFiles:
    """Find or fetch the model and read all but its weights. Blocks; raises ModelError."""
    return open_model(settings.model, cache_dir=settings.cache_dir, load_format=settings.load_format, progress=progress)


def make_client(settings: Settings, files: ModelFiles) -> EngineClient:
    """The engine that the settings ask for, not yet started."""
    return ThreadClient(core_factory(settings, files))


def core_factory(settings: Settings, files: ModelFiles) -> Callable[[], EngineCore]:
    """A function that loads the model and makes the engine's core; to be called on the thread that will run it."""

    def make_core() -> EngineCore:
        executor = make_executor(settings, files)
        logger.info("%s", executor.summary)
        config = EngineConfig(
            max_model_len=executor.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            target_inter_token_latency=settings.target_inter_token_latency,
            enable_prefix_caching=settings.enable_prefix_caching,
            eos_token_ids=files.config.eos_token_ids,
        )
        return EngineCore(config, executor)

    return make_core


def make_executor(settings: Settings, files: ModelFiles) -> UniProcExecutor:
    """Load the model onto the device that the settings ask for. Tests put an executor that fails in front of it."""
    from gpu.executor import load_executor
    from gpu.worker import WorkerOptions

    options = WorkerOptions(
        dtype=settings.dtype,
        device=settings.device,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        block_size=settings.block_size,
        kv_cache_memory=settings.kv_cache_memory,
    )
    return load_executor(files, options, num_threads=settings.num_threads)


def open_llm(settings: Settings, progress: Progress | None = None) -> LLM:
    """The offline engine for a model, loaded on the calling thread, which then has to do the generating."""
    files = open_files(settings, progress)
    return LLM(core_factory(settings, files)(), files.tokenizer, seed=settings.seed)
