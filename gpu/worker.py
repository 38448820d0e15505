"""The worker: one device with its model, its KV cache and the runner that uses them.

Made by an executor, in the thread that will run the steps.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError
from gpu.checkpoint import ModelConfig
from gpu.checkpoint.architecture import DecoderSpec
from gpu.cpu.decoder import CPUCausalLM
from gpu.host import usable_cores
from gpu.kv_cache_size import CPU_MEMORY_LIMIT, CPU_MEMORY_SHARE, GIB, KVCacheSize, check_memory, kv_cache_size
from gpu.kv_layout import kv_layout
from gpu.model_loader import ServedModel, WorkerOptions, free_memory, load_model, use_device
from gpu.model_runner import ModelRunner
from gpu.perplexity import Perplexity, perplexity
from gpu.rows import BatchSizes
from gpu.runner import NO_LINKS, Runner, StageLinks

if TYPE_CHECKING:
    from gpu.profile import WorkerProfile


class Worker:
    """Loads on construction, which takes seconds to minutes; raises ConfigError where the options cannot work."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, Any]],
        options: WorkerOptions,
        text: Sequence[int] = (),
        *,
        spec: DecoderSpec | None = None,
        communicator: Any = None,
        links: StageLinks = NO_LINKS,
        agree: Callable[[KVCacheSize], KVCacheSize] = lambda size: size,
    ) -> None:
        """Of `text`, if there is one, `perplexity` is computed: a string for the log.

        One rank of several has its own `spec` (`gpu.model_loader.rank_spec`) and the weights of that, a `communicator`
        where its stage has several tensor ranks, and `links` to the stages beside its own. `agree` makes of the KV
        cache that it can have the one that all ranks can.
        """
        self.device = use_device(options.device)
        self._on_cuda = self.device != "cpu"
        self._num_threads = options.num_threads or usable_cores()
        self._entered = threading.local()
        model = load_model(config, weights, options, self.device, spec, communicator)
        self._links = links
        self.compute_form = f"{self.device.partition(':')[0]}, {model.forms}"
        self.computes = f"{self.device}, {model.forms}, {self._num_threads} threads"  # in words
        self._model: ServedModel | None = model
        self._native = model if isinstance(model, CPUCausalLM) else None
        self.prompt_form_differs = model.prompt_form_differs

        self.kv_windows = kv_layout(config).windows
        size = kv_cache_size(
            config,
            element_size=model.element_size,
            block_size=options.block_size,
            tokens_held=model.tokens_held,
            max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len,
            max_num_batched_tokens=options.max_num_batched_tokens,
            budget=self._kv_cache_budget(model, options),
            kv_cache_memory=options.kv_cache_memory,
            spec=spec,
        )
        self.kv_cache_size = agree(size)
        model.set_max_model_len(self.kv_cache_size.max_model_len)
        self.kv_caches: Sequence[Any] = ()
        self.runner = self._make_runner(model, options)
        num_places = self.kv_cache_size.num_blocks // len(self.kv_windows)
        room = min(num_places * options.block_size, self.kv_cache_size.max_model_len, options.max_num_batched_tokens)
        self.perplexity: Perplexity | None = None
        if text and links == NO_LINKS:
            self.perplexity = perplexity(model, text[:room], options.block_size, len(self.kv_windows))
        # How many steps should be on their way at once: more than one where a step runs on by itself.
        self.pipeline_depth = 2 if self._on_cuda else 1

    def enter_thread(self) -> None:
        """Set the state that torch keeps for each thread, the current device and the number of helper threads: this may
        be another thread than the one that loaded the model."""
        if self._native is None and not hasattr(self._entered, "num_threads"):
            from gpu.models.served import use_threads

            use_device(self.device)
            use_threads(self._num_threads)
            self._entered.num_threads = self._num_threads

    @property
    def is_native(self) -> bool:
        """Whether the library of the CPU path computes."""
        return self._native is not None

    def start_profile(self) -> WorkerProfile:
        """Record what it does."""
        from gpu.profile import HostProfile, TorchProfile

        if self._native is not None and isinstance(self.runner, ModelRunner):
            return HostProfile(self.runner, self._native)
        return TorchProfile()

    def tokens_of_experts(self) -> list[list[int]]:
        """How many tokens each expert of each layer has had."""
        return [] if self._model is None else [counts.tolist() for counts in self._model.tokens_of_experts]

    def shutdown(self) -> None:
        """Give model and cache back, when the steps in flight are over. The last thing that is asked of a worker."""
        if self._on_cuda:
            from gpu.device.memory import synchronize

            synchronize(self.device)
        del self.runner
        self._model = self._native = None
        self.kv_caches = ()
        gc.collect()
        if self._on_cuda:
            from gpu.device.memory import release

            release()

    def _make_runner(self, model: ServedModel, options: WorkerOptions) -> Runner:
        size, num_groups = self.kv_cache_size, len(self.kv_windows)
        sizes = BatchSizes(options.max_num_seqs, size.max_model_len, options.block_size, num_groups)
        if options.runner == "host" or (options.runner == "auto" and (not self._on_cuda or self._links != NO_LINKS)):
            model.allocate_kv_cache(size.num_blocks)
            self.kv_caches = model.kv_caches
            return ModelRunner(model, sizes, self._links, model.shards)
        from gpu.device import make_device_runner
        from gpu.models.served import TorchModel

        assert isinstance(model, TorchModel)
        runner = make_device_runner(model, size.num_blocks, sizes, options.max_num_batched_tokens)
        self.kv_caches = runner.kv_caches
        return runner

    def _kv_cache_budget(self, model: ServedModel, options: WorkerOptions) -> int:
        """Bytes that the KV cache may take, with the weights in place. Raises ConfigError if more was asked for."""
        if self._on_cuda and self._links != NO_LINKS:
            if options.kv_cache_memory is None:
                allowed = (
                    "what the steps of a stage take on a CUDA device is not measured, so kv_cache_memory is needed"
                )
                raise ConfigError("kv_cache_memory", None, allowed=allowed, hint=f"kv_cache_memory={4 * GIB} works")
            budget = options.kv_cache_memory
        elif self._on_cuda:
            from gpu.device.memory import kv_cache_budget
            from gpu.models.served import TorchModel

            assert isinstance(model, TorchModel)
            budget = kv_cache_budget(model, options)  # a rehearsal, which is wanted in any case
        else:
            budget = int(min(CPU_MEMORY_SHARE * free_memory("cpu"), CPU_MEMORY_LIMIT) * options.kv_cache_share)
        if options.kv_cache_memory is not None:
            check_memory(options.kv_cache_memory, free_memory(self.device))
            return options.kv_cache_memory
        return budget
