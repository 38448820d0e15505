"""The law: whatever happened to a request, its greedy tokens are those of its solo, cold run.

A `History` is a random life of an engine, drawn by its seed: requests that share prefixes, go on with what was said
before, are cut into chunks, preempted, resumed and left, over a pool of blocks that is too small. Whoever adds
something that may happen to a request adds an event here (`History.EVENTS` and a method of that name), and what has to
be seen of it to `seen`.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.messages import EngineCoreRequest, FinishReason
from engine.plan import SchedulerOutput, most_blocks
from gpu.checkpoint import ModelConfig
from gpu.checkpoint.tensors import tensor_shapes
from gpu.executor import UniProcExecutor
from gpu.kv_tiers.chunks import HostMemory, Signer, TorchMemory
from gpu.kv_tiers.stores import DiskStore, RamStore
from gpu.kv_tiers.tier import BlockStore, KVTier
from gpu.runner.runner import WorkerOptions
from gpu.worker import Worker
from tests.engine.helpers import make_request
from tests.golden.driving import RecordedExecutor

MAX_MODEL_LEN, MAX_TOKENS = 96, 14
LENGTHS = (1, 3, 4, 5, 8, 10, 16, 17, 23, 32, 37, 48, 59, 64, 80)  # of prompts; few, so that the law knows them soon
PLACES, NUM_CHUNKS = 2, 100  # of a chunk in a tier; that there is room for
TOLERANCE = 1e-4  # of log-probabilities, where a sum's order may depend on the batch
OF_STATES, NEAR_TIE = 5e-3, 1e-3  # the same of models with states


def small_model(**changes: Any) -> ModelConfig:
    """Large enough for the library, with windows if asked for."""
    return ModelConfig(
        **{
            "architecture": "LlamaForCausalLM",
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": MAX_MODEL_LEN,
            "rope_theta": 500.0,
            **changes,
        }
    )


def weights_of(config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """So large that a token depends on all that its layers see: wrong keys or values show at once."""
    generator = np.random.default_rng(0)
    for name, shape in tensor_shapes(config).items():
        spread = 0.3 if len(shape) == 1 else 1.5 * shape[1] ** -0.5
        yield name, generator.normal("norm" in name, spread, shape).astype(np.float32)


def load(config: ModelConfig, **options: Any) -> EngineCore:
    """An engine over the model. The histories share its weights and its cache, one after the other."""
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    options = {"block_size": 4, "num_threads": 1, "kv_cache_memory": 2**20, "device": "cpu", **limits, **options}
    worker = Worker(config, weights_of(config), WorkerOptions(**options))
    executor = UniProcExecutor(worker, config.vocab_size)
    settled: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "facts": executor.facts, **limits}
    return EngineCore(EngineConfig(target_inter_token_latency=60.0, **settled), executor)


class Law:
    """What the model of an engine answers to anybody who comes alone and finds nothing."""

    def __init__(self, core: EngineCore, folder: Path, *, exact: bool, depths: Sequence[int] = (1,)) -> None:
        """`exact`: not even the last bit of a log-probability may differ. `depths`: how many steps may be in flight.
        All histories keep blocks in the `folder`, so that each finds what those before have left."""
        self.core = core
        self.folder = folder
        self.has_states = core.config.facts.state_bytes > 0
        self.tolerance = 0.0 if exact else OF_STATES if self.has_states else TOLERANCE
        # Tokens that are so close may change places. Models with states come close, as they have two forms of a sum.
        self.near_tie = NEAR_TIE if self.has_states and not exact else 0.0
        self.depths = depths
        self.seen: Counter[str] = Counter()  # what the histories went through
        self._answers: dict[tuple[int, ...], list[tuple[int, float]]] = {}

    def answer(self, prompt: Sequence[int]) -> list[tuple[int, float]]:
        """The first `MAX_TOKENS` tokens, each with its log-probability."""
        key = tuple(prompt)
        if key not in self._answers:
            core = self.engine(enable_prefix_caching=False)
            core.add(ask(prompt, "alone"))
            answer: list[tuple[int, float]] = []
            while core.has_work:
                answer += said(core, "alone")
            self._answers[key] = answer
        return self._answers[key]

    def engine(self, num_blocks: int | None = None, tier: KVTier | None = None, **config: Any) -> EngineCore:
        """An engine that knows nothing yet."""
        executor = RecordedExecutor(self.core.executor, num_blocks)
        executor.tier = tier
        return EngineCore(dataclasses.replace(self.core.config, **config), executor)

    def tier(self) -> KVTier:
        """The folder, with room for some of what is stored."""
        assert isinstance(self.core.executor, UniProcExecutor)
        assert self.core.executor._worker is not None
        caches = self.core.executor._worker.kv_caches
        memory = HostMemory(caches) if isinstance(caches[0], np.ndarray) else TorchMemory(caches)
        num_bytes = PLACES * len(self.core.config.facts.kv_windows) * memory.block_bytes
        signer = Signer(b"k" * 32, b"n" * 16, num_bytes)
        stores: list[BlockStore] = [DiskStore(self.folder, signer, NUM_CHUNKS * signer.chunk_bytes)]
        if isinstance(memory, TorchMemory):  # as beside a card
            stores.insert(0, RamStore(NUM_CHUNKS // 4 * num_bytes))
        return KVTier(memory, b"h" * 32, PLACES, num_bytes, lambda: stores)


def removal_of(names: Iterable[str]) -> SchedulerOutput:
    """The plan that takes these rows from a runner, and does nothing else."""
    return SchedulerOutput(
        step=0,
        removed_request_ids=list(names),
        new_requests=[],
        new_block_ids={},
        request_ids=[],
        num_scheduled_tokens=[],
        num_sampled_tokens=[],
        total_num_scheduled_tokens=0,
    )


def ask(prompt: Sequence[int], name: str, max_tokens: int = MAX_TOKENS, tenant: str = "") -> EngineCoreRequest:
    asked = {"max_tokens": min(max_tokens, MAX_MODEL_LEN - len(prompt)), "ignore_eos": True, "logprobs": 0, "seed": 0}
    return make_request(prompt, name, tenant=tenant, **asked)


def said(core: EngineCore, name: str) -> list[tuple[int, float]]:
    """Step once: what this request said."""
    outputs = [output for output in core.step().outputs if output.request_id == name]
    return [(entry.token_id, entry.logprob) for output in outputs for entry in output.logprobs or ()]


class History:
    """One life of an engine."""

    EVENTS: ClassVar[dict[str, int]] = {
        "arrive": 6,
        "crowd": 1,
        "follow": 3,
        "leave": 1,
        "run": 8,
        "rest": 1,
        "restart": 1,
    }  # how likely each is

    def __init__(self, law: Law, seed: int) -> None:
        self.law = law
        self.draw = draw = random.Random(seed)
        self.requests: dict[str, EngineCoreRequest] = {}
        self.said: dict[str, list[tuple[int, float]]] = {}
        self.left: set[str] = set()
        self.num_cached: dict[str, int] = {}
        self.tier = law.tier() if draw.random() < 0.7 and not law.has_states else None
        self.limits: dict[str, Any] = {
            "max_num_seqs": draw.randint(2, 8),
            "max_num_batched_tokens": draw.choice([8, 9, 16, 30, 64]),
            "enable_prefix_caching": draw.random() < 0.9,
            "pipeline_depth": draw.choice(law.depths),
            "num_blocks": draw.uniform(1.0, 3.0),
        }
        if law.has_states:
            facts = law.core.config.facts
            most = draw.choice([0, 1, 3, 10, facts.num_checkpoints])
            self.limits["facts"] = msgspec.structs.replace(facts, num_checkpoints=most)
            self.limits["state_checkpoint_interval"] = draw.choice([4, 8, 16, 40])
        self.core = self.engine(**self.limits)

    def engine(self, num_blocks: float, **config: Any) -> EngineCore:
        """With room for so many requests of the longest context."""
        known = self.law.core
        step = config["max_num_batched_tokens"] * config["pipeline_depth"]
        block_size = known.executor.block_size
        longest = most_blocks(known.config.facts.kv_windows, block_size, known.config.max_model_len, step)
        return self.law.engine(min(int(num_blocks * longest), known.executor.num_blocks), self.tier, **config)

    def tell(self, num_events: int = 12) -> None:
        """Live it to its end, and hold it against the law."""
        for _ in range(num_events):
            (event,) = self.draw.choices(list(self.EVENTS), list(self.EVENTS.values()))
            getattr(self, event)()
        while self.core.has_work:
            self.step()
        if self.tier is not None:
            self.tier.close()
        for name, request in self.requests.items():
            expected = self.law.answer(request.prompt_token_ids)[: request.sampling.max_tokens]
            said = self.said[name]
            assert len(said) == len(expected) or name in self.left, name
            for position, ((token, logprob), (right, truth)) in enumerate(zip(said, expected, strict=False)):
                where = (
                    f"{name} with {len(request.prompt_token_ids)} tokens, {self.num_cached.get(name)} found: {position}"
                )
                if token != right and abs(logprob - truth) < self.law.near_tie:
                    self.law.seen["near ties"] += 1
                    break
                assert token == right, where
                assert abs(logprob - truth) <= self.law.tolerance, where

    # --- what may happen

    def arrive(self, prompt: Sequence[int] | None = None) -> None:
        prompt = self.prompt() if prompt is None else prompt
        name, tenant = f"r{len(self.requests)}", self.draw.choice(["", "", "", "blue"])
        request = ask(prompt[: MAX_MODEL_LEN - 1], name, self.draw.randint(1, MAX_TOKENS), tenant)
        self.requests[name], self.said[name] = request, []
        self.core.add(request)

    def crowd(self) -> None:
        prompt = self.prompt()
        for _ in range(self.draw.randint(2, 5)):
            self.arrive(prompt)

    def follow(self) -> None:
        """The next turn of a conversation, whose last answer may still be under way."""
        if self.requests:
            name = self.draw.choice(list(self.requests))
            answer = [token for token, _ in self.said[name]]
            self.arrive([*self.requests[name].prompt_token_ids, *answer, *self.prompt()[: self.draw.randint(1, 9)]])

    def leave(self) -> None:
        if self.core.scheduler.requests:
            name = self.draw.choice(list(self.core.scheduler.requests))
            self.left.add(name)
            self.core.finish_request(name, FinishReason.ABORT)
            self.law.seen["left"] += 1

    def rest(self) -> None:
        """Nobody wants anything for a moment, so what was computed is stored."""
        while self.core.has_work:
            self.step()
        while self.core.prepare():
            pass

    def restart(self) -> None:
        """An engine that knows only what is in the folder. Whoever was in the one before is lost."""
        if self.draw.random() < 0.5:
            self.rest()
        self.left.update(self.core.scheduler.requests)
        self.law.core.executor.submit(removal_of(self.requests)).result()  # the process and its rows are gone
        if self.tier is not None:
            self.tier.close()
            self.tier = self.law.tier()
        self.core = self.engine(**self.limits)
        self.law.seen["restarted"] += 1

    def run(self) -> None:
        for _ in range(self.draw.randint(1, 8)):
            self.step()

    def step(self) -> None:
        batch = self.core.step()
        for output in batch.outputs:
            assert output.error is None
            self.said[output.request_id] += [(entry.token_id, entry.logprob) for entry in output.logprobs or ()]
            self.num_cached[output.request_id] = output.num_cached_tokens
        assert isinstance(self.core.executor, RecordedExecutor)
        plan = self.core.executor.plans[-1]
        self.law.seen["preempted"] += batch.stats.num_preemptions
        self.law.seen["hits"] += batch.stats.prefix_cache_hits > 0
        self.law.seen["checkpoints"] += batch.stats.checkpoints is not None and batch.stats.checkpoints.hits > 0
        self.law.seen["loaded"] += sum(each.hit_tokens for each in batch.stats.tiers or ())
        self.law.seen["chunks"] += plan.num_sampled_tokens.count(0)
        self.law.seen["mixed steps"] += len(set(plan.num_scheduled_tokens)) > 1

    def prompt(self) -> list[int]:
        """They begin alike in families, of any length, and some have an ending of their own."""
        family, length = self.draw.randrange(3), self.draw.choice(LENGTHS)
        draw = random.Random(family)
        tokens = [draw.randrange(self.law.core.executor.vocab_size) for _ in range(length)]
        return tokens + self.draw.choice([[], [], [7], [3, 1, 4]])
