"""The executor of one worker in the engine's own thread. The application makes it and hands it to the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError, EngineDead
from engine.executor import StepHandle
from engine.plan import SchedulerOutput
from gpu.checkpoint import ModelFiles
from gpu.host import processor_name
from gpu.kv_tiers.opening import check_tiers, digest_of_weights, open_tier
from gpu.kv_tiers.tier import KVTier
from gpu.model_loader import rank_spec, resolve_device
from gpu.runner.runner import WorkerOptions
from gpu.sharding import Layout
from gpu.weights.quantization import Quantization
from gpu.weights.reading import read_weights
from gpu.worker import EncoderWorker, Worker, sample_text

if TYPE_CHECKING:
    from gpu.profile import HostProfile, TorchProfile


NO_TIERS = "this model has no KV cache, or its KV blocks are useless without its states, which are kept only there"


def load_executor(files: ModelFiles, options: WorkerOptions | None = None) -> UniProcExecutor:
    """Load a model; call it in the thread that will run the steps. It reports to `files.progress`.

    Raises ConfigError for options that cannot work, ModelError for files.
    """
    options = options or WorkerOptions()
    check_tiers(options, resolve_device(options.device))
    digest = digest_of_weights(files) if options.kv_cache_dir is not None else None  # on a thread
    worker, cost = load_worker(files, options, Layout())
    executor = UniProcExecutor(worker, files.config.vocab_size)
    executor.summary += cost
    executor.open_tier(files, options, digest)
    return executor


def load_worker(files: ModelFiles, options: WorkerOptions, layout: Layout, **ranks: Any) -> tuple[Worker, str]:
    """Return a worker with its weights, and a sentence for the log about their quantization error. `ranks` are a
    `Worker`'s arguments for one of several ranks."""
    device = resolve_device(options.device)
    if files.config.encoder is not None:
        return EncoderWorker(files.config, read_weights(files), options), ""
    spec = rank_spec(files.config, options, device, layout)
    if files.quantized is not None and device != "cpu" and spec.has_kernels:
        from gpu.models.torch_model import resolve_dtype

        spec = replace(spec, keeps_packed=resolve_dtype(options.dtype, files.config, device).itemsize == 2)
    ranks |= {"spec": spec, "progress": files.progress}
    if options.quantization != "none":
        quantization = Quantization(options.quantization, files.config)
        weights = quantization.applied_to(read_weights(files, spec))
        worker = Worker(files.config, weights, options, text=sample_text(files.tokenizer, files.config), **ranks)
        error = f"{quantization.relative_error:.2%} off (root mean square)"
        perplexity = "" if worker.perplexity is None else f"; {worker.perplexity}"  # a pipeline stage has none
        return worker, f". Weights were quantized to {quantization.name}: {error}{perplexity}"
    if device == "cpu":
        return Worker(files.config, read_weights(files, spec), options, **ranks), ""
    from gpu.weights.tensors import weights_of

    return Worker(files.config, weights_of(files, device, spec), options, **ranks), ""


class UniProcExecutor:
    """An `engine.executor.Executor` of one worker. On a CPU a step has run when `submit` returns."""

    def __init__(self, worker: Worker, vocab_size: int) -> None:
        self.num_blocks = worker.kv_cache_size.num_blocks
        self.block_size = worker.kv_cache_size.block_size
        self.vocab_size = vocab_size
        self.max_model_len = worker.kv_cache_size.max_model_len  # what fits, for the engine's configuration
        self.pipeline_depth = worker.pipeline_depth  # what suits the device
        self.facts = worker.facts
        self.machine = f"{worker.computes}, {device_name(worker.device)}"  # what steps cost depends on it
        self.summary = f"{worker.computes}. {worker.kv_cache_size}"
        self.cpu_seconds = time.thread_time if worker.device == "cpu" else None
        self.tier: KVTier | None = None
        self._worker: Worker | None = worker
        self._profile: HostProfile | TorchProfile | None = None

    def open_tier(self, files: ModelFiles, options: WorkerOptions, digest: Callable[[], bytes] | None) -> None:
        """Open the tier that the options ask for, if any."""
        if self._worker is not None and (options.kv_cache_dir is not None or options.kv_cache_ram):
            if self.facts.state_bytes or self.facts.is_encoder:
                setting = "kv_cache_ram" if options.kv_cache_dir is None else "kv_cache_dir"
                raise ConfigError(setting, getattr(options, setting), allowed=NO_TIERS, hint=f"leave out {setting}")
            caches, num_groups = self._worker.kv_caches, len(self.facts.kv_windows)
            scaling = files.config.rope_scaling
            is_long = scaling is not None and scaling.is_long(self.max_model_len)
            form = self.facts.compute_form + (", rotated for long contexts" if is_long else "")
            self.tier = open_tier(caches, num_groups, files, options, form, digest)

    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> StepHandle:
        if self._worker is None:
            raise EngineDead("the executor has been shut down")
        self._worker.enter_thread()
        return self._worker.runner.submit(plan, abandoned)

    def prepare(self) -> bool:
        return self._worker is not None and self._worker.runner.prepare()

    def tokens_of_experts(self) -> list[list[int]]:
        return [] if self._worker is None else self._worker.tokens_of_experts()

    def start_profile(self) -> None:
        if self._worker is not None and self._profile is None:
            self._profile = self._worker.start_profile()

    def stop_profile(self) -> list[dict[str, Any]]:
        profile, self._profile = self._profile, None
        return [] if profile is None else profile.stop()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None


def device_name(device: str) -> str:
    if device.startswith("cuda"):
        from gpu.device.warm_up import device_name as name_of

        return name_of(device)
    return processor_name()
