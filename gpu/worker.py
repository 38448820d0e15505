"""One device with its model, KV cache and runner.

Made by an executor, in the thread that will run the steps.
"""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import structs
from tokenizers import Tokenizer

from engine.errors import ConfigError
from engine.messages import ModelFacts
from gpu.checkpoint import ModelConfig
from gpu.checkpoint.architecture import DecoderSpec
from gpu.checkpoint.families.table import spec_of
from gpu.checkpoint.model_files import Progress, no_progress
from gpu.checkpoint.tensors import tensor_shapes
from gpu.cpu.decoder import CPUCausalLM
from gpu.cpu.encoder import CPUEncoder
from gpu.host import usable_cores
from gpu.kv_cache import (
    CPU_MEMORY_LIMIT,
    CPU_MEMORY_SHARE,
    GIB,
    KVCacheSize,
    check_max_model_len,
    check_memory,
    kv_cache_size,
    kv_layout,
)
from gpu.model_loader import ServedModel, free_memory, load_encoder, load_model, use_device
from gpu.runner.encoder_runner import EncoderHeads, EncoderInputs, EncoderRunner
from gpu.runner.host_runner import MAX_LOGITS_ROWS, ModelRunner
from gpu.runner.rows import BatchSizes
from gpu.runner.runner import NO_LINKS, LanguageModel, ModelInputs, Runner, StageLinks, StateInputs, WorkerOptions
from gpu.sampling.sampler import token_logprobs

if TYPE_CHECKING:
    from gpu.profile import HostProfile, TorchProfile


class Worker:
    """A device with a loaded model. Construction takes seconds to minutes; it raises ConfigError for wrong options."""

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
        progress: Progress = no_progress,
    ) -> None:
        """Load the model. If there is a `text`, compute its `perplexity` for the log.

        One of several ranks has its own `spec` (`gpu.model_loader.rank_spec`) and the weights for it, a `communicator`
        if its stage has several tensor ranks, and `links` to the stages before and after. `agree` takes the KV cache
        that the rank could have, and returns the one that all ranks can. `progress` is called during the warm-up.
        """
        self.device = use_device(options.device)
        if not (spec or spec_of(config)).has_kernels:
            options = replace(options, runner="host")
        self._on_cuda = self.device != "cpu"
        self._num_threads = options.num_threads or usable_cores()
        self._vocab_size = config.vocab_size
        self._entered = threading.local()
        model = load_model(config, weights, options, self.device, spec, communicator)
        self._links = links
        self.computes = f"{self.device}, {model.forms}, {self._num_threads} threads"  # in words
        self._model: ServedModel | None = model
        self._native = model if isinstance(model, CPUCausalLM) else None
        self.facts = ModelFacts(
            kv_windows=kv_layout(config).windows,
            prompt_form_differs=self._native is not None and self._native.prompt_form_differs,
            compute_form=f"{self.device.partition(':')[0]}, {model.forms}",
            is_batch_invariant=self._native is not None,
        )
        size = kv_cache_size(
            config,
            element_size=model.element_size,
            block_size=options.block_size,
            tokens_held=model.tokens_held,
            max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len,
            max_num_batched_tokens=options.max_num_batched_tokens,
            budget=self._kv_cache_budget(model, options, progress),
            kv_cache_memory=options.kv_cache_memory,
            checkpoint_share=options.state_checkpoint_share,
            spec=spec,
        )
        self.kv_cache_size = agree(size)
        self.facts = structs.replace(self.facts, state_bytes=size.state_bytes, num_checkpoints=size.num_checkpoints)
        model.set_max_model_len(self.kv_cache_size.max_model_len)
        self.kv_caches: Sequence[Any] = ()
        self.runner = self._make_runner(model, options, progress)
        num_places = self.kv_cache_size.num_blocks // len(self.facts.kv_windows)
        room = min(num_places * options.block_size, self.kv_cache_size.max_model_len, options.max_num_batched_tokens)
        self.perplexity: Perplexity | None = None
        if text and links == NO_LINKS:
            self.perplexity = perplexity(model, text[:room], options.block_size, len(self.facts.kv_windows))
        # The number of steps to keep in flight: more than one if the device runs steps while the host goes on.
        self.pipeline_depth = 2 if self._on_cuda and options.runner != "host" else 1

    def enter_thread(self) -> None:
        """Set the state that torch keeps for each thread, the current device and the number of helper threads: this may
        be another thread than the one that loaded the model."""
        if self._native is None and not hasattr(self._entered, "num_threads"):
            from gpu.models.torch_model import use_threads

            use_device(self.device)
            use_threads(self._num_threads)
            self._entered.num_threads = self._num_threads

    def start_profile(self) -> HostProfile | TorchProfile:
        from gpu.profile import HostProfile, TorchProfile

        if self._native is not None and isinstance(self.runner, ModelRunner):
            return HostProfile(self.runner, self._native)
        return TorchProfile()

    def tokens_of_experts(self) -> list[list[int]]:
        return [] if self._model is None else [counts.tolist() for counts in self._model.tokens_of_experts]

    def shutdown(self) -> None:
        """Free the model and the cache when the steps in flight are over. The worker cannot be used afterwards."""
        if self._on_cuda:
            from gpu.device.warm_up import synchronize

            synchronize(self.device)
        del self.runner
        self._model = self._native = None
        self.kv_caches = ()
        gc.collect()
        if self._on_cuda:
            from gpu.device.warm_up import release

            release()

    def _make_runner(self, model: ServedModel, options: WorkerOptions, progress: Progress) -> Runner:
        size, num_groups = self.kv_cache_size, len(self.facts.kv_windows)
        has_states = size.state_bytes > 0
        sizes = BatchSizes(options.max_num_seqs, size.max_model_len, options.block_size, num_groups, has_states)
        if options.runner == "host" or (options.runner == "auto" and (not self._on_cuda or self._links != NO_LINKS)):
            model.allocate_kv_cache(size.num_blocks)
            if has_states:
                model.allocate_states(size.num_states + size.num_checkpoints)
            self.kv_caches = model.kv_caches
            host_runner = ModelRunner(model, sizes, self._links, model.shards)
            if self._on_cuda and self._links == NO_LINKS:
                from gpu.device.warm_up import rehearse

                rehearse(host_runner, sizes, options.max_num_batched_tokens, self._vocab_size, progress)
            return host_runner
        from gpu.device.runner import make_device_runner
        from gpu.models.torch_model import TorchModel

        assert isinstance(model, TorchModel)
        runner = make_device_runner(model, size.num_blocks, sizes, options.max_num_batched_tokens)
        self.kv_caches = runner.kv_caches
        return runner

    def _kv_cache_budget(self, model: ServedModel, options: WorkerOptions, progress: Progress) -> int:
        """Return the bytes that the KV cache may take besides the weights. Raises ConfigError if more was asked for."""
        is_measured = self._links == NO_LINKS and options.runner != "host"
        if self._on_cuda and not is_measured and options.kv_cache_memory is None:
            allowed = "the memory of such a model's or stage's steps on a CUDA device is not measured, so it is needed"
            raise ConfigError("kv_cache_memory", None, allowed=allowed, hint=f"kv_cache_memory={4 * GIB} works")
        if self._on_cuda:
            from gpu.device.warm_up import compile_stage, kv_cache_budget
            from gpu.models.torch_model import TorchModel

            assert isinstance(model, TorchModel)
            if is_measured:
                budget = kv_cache_budget(model, options, self._num_threads, progress)
            else:
                if self._links != NO_LINKS:
                    compile_stage(model, options, self._links, self._num_threads, progress)
                budget = 0  # kv_cache_memory is given
        else:
            budget = int(min(CPU_MEMORY_SHARE * free_memory("cpu"), CPU_MEMORY_LIMIT) * options.kv_cache_share)
        if options.kv_cache_memory is not None:
            check_memory(options.kv_cache_memory, free_memory(self.device))
            return options.kv_cache_memory
        return budget


class EncoderWorker(Worker):
    """A device with a loaded encoder, which has no KV cache. To the engine, a request takes one block."""

    def __init__(self, config: ModelConfig, weights: Iterable[tuple[str, Any]], options: WorkerOptions) -> None:
        self.device = use_device(options.device)
        self._on_cuda = self.device != "cpu"
        self._num_threads = options.num_threads or usable_cores()
        self._entered = threading.local()
        self._model = None
        heads = EncoderHeads(config.encoder)
        longest = check_max_model_len(config, options.max_model_len)
        options = replace(options, max_num_batched_tokens=max(options.max_num_batched_tokens, longest))
        encoder = load_encoder(config, heads.take(weights), options, self.device)
        self._native = encoder if isinstance(encoder, CPUEncoder) else None
        self.computes = f"{self.device}, {encoder.forms}, {self._num_threads} threads"
        self.facts = ModelFacts(
            compute_form=f"{self.device.partition(':')[0]}, {encoder.forms}",
            is_batch_invariant=self._native is not None,
            is_encoder=True,
        )
        self.kv_cache_size = KVCacheSize(
            num_blocks=options.max_num_seqs,
            block_size=longest,
            bytes_per_block=0,
            max_model_len=longest,
            num_tokens=options.max_num_seqs * longest,
        )
        self.kv_caches = ()
        self.runner = EncoderRunner(encoder, config.encoder, heads)
        self.perplexity = None
        self.pipeline_depth = 1
        if self._on_cuda:  # the largest step compiles the kernel, and memory that does not suffice is found now
            size = options.max_num_batched_tokens
            zeros, starts = np.zeros(size, np.int64), np.array([*range(0, size, longest), size], np.int32)
            encoder.encode(EncoderInputs(zeros, zeros, zeros, starts))


# ----------------------------------------------------------------------------------------------------------- perplexity
# The perplexity of a short text, logged if weights were quantized at load: it shows whether that spoiled the model. It
# is computed when the model has its cache, before the first step.


_TEXT = """\
A server of language models has many clients at once, and each of them waits for its own answer. Some have asked for \
a word, some for a page, and some have left without saying so. The server reads all prompts, and then it makes one \
token for everybody in every step, over and over, until the last answer is complete. What it has computed of a prompt \
stays in memory, in blocks of sixteen tokens, because every later token looks back at all earlier ones. When the \
blocks run out, somebody has to give way and will be computed again.

So there are three questions. Who comes next? Whoever has been served least. Who gives way? Whoever came last. And \
when is a request over? When its answer is complete, when its time is up, or when its client is gone, whichever is \
first. Then everything that it had is given back: its place in the queue, its blocks and its row in the batch. If one \
of the three is answered badly, the machine may be fast and people will still find it slow.
"""
_MOST_PRODUCTS = 30 * 10**9  # a second of one thread on a slow processor
_FEWEST_TOKENS = 32  # for a model so large that these take longer


class Perplexity(NamedTuple):
    """The perplexity `value` of `num_tokens` tokens, each predicted from all before it."""

    value: float
    num_tokens: int

    def __str__(self) -> str:
        return f"perplexity {self.value:.2f} over {self.num_tokens} tokens of a built-in text"


def sample_text(tokenizer: Tokenizer, config: ModelConfig) -> list[int]:
    """Return some two hundred tokens of the text, fewer for a large model."""
    num_weights = sum(map(math.prod, tensor_shapes(config).values()))
    known = [token for token in tokenizer.encode(_TEXT).ids if token < config.vocab_size]
    return known[: max(_FEWEST_TOKENS, _MOST_PRODUCTS // num_weights)]


def perplexity(model: LanguageModel, token_ids: Sequence[int], block_size: int, num_groups: int = 1) -> Perplexity:
    """Compute the perplexity of all tokens except the first, in one pass. It overwrites the cache's first blocks."""
    count = len(token_ids)
    inputs = ModelInputs(
        input_ids=np.array(token_ids, dtype=np.int64),
        positions=np.arange(count),
        query_start_loc=np.array([0, count], dtype=np.int32),
        seq_lens=np.array([count], dtype=np.int32),
        block_tables=np.arange(num_groups * -(-count // block_size), dtype=np.int32).reshape(num_groups, 1, -1),
        num_decodes=int(count == 1),
        num_prompt_tokens=np.array([count], dtype=np.int32),
        states=StateInputs(np.zeros(1, dtype=np.int64), [(0, -1)], {}),  # ignored without states
    )
    hidden, total = model.forward(inputs)[:-1], 0.0
    for start in range(0, len(hidden), MAX_LOGITS_ROWS):
        rows = hidden[start : start + MAX_LOGITS_ROWS]
        targets = inputs.input_ids[start + 1 : start + 1 + len(rows)]
        entries = token_logprobs(model.compute_logits(rows), targets, np.zeros_like(targets))
        total += math.fsum(entry.logprob for entry in entries)
    mean = -total / max(1, len(hidden))
    return Perplexity(math.exp(mean) if mean < 700 else math.inf, len(hidden))
