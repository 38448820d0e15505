"""What the engine's tests share: requests in a line, a real tokenizer of 259 tokens, and an observer that remembers."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

import engine.transport.channel
from engine.config import Clock, EngineConfig
from engine.core.core import EngineCore
from engine.costs.table import StepBudget, StepCostTable
from engine.fairness import threadsafe_call_soon
from engine.frontend.request_stream import FinishedRequest, Observer
from engine.messages import EngineCoreOutput, EngineCoreRequest, ModelFacts, SamplingParams, SchedulerStats
from engine.plan import SchedulerOutput
from engine.scheduler.scheduler import Scheduler
from tests.engine.checked_executor import CheckedExecutor
from tests.engine.queueing_executor import QueueingExecutor
from tests.engine.simulated_executor import SimulatedExecutor

_ids = itertools.count()


def make_request(
    prompt: Sequence[int],
    request_id: str | None = None,
    *,
    priority: int = 0,
    tenant: str = "",
    **sampling: Any,
) -> EngineCoreRequest:
    """A greedy request unless `sampling` says otherwise."""
    return EngineCoreRequest(
        request_id=request_id or f"request-{next(_ids)}",
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(**{"temperature": 0.0, **sampling}),
        arrival_time=0.0,
        priority=priority,
        tenant=tenant,
    )


def make_scheduler(config: EngineConfig, num_blocks: int, block_size: int) -> Scheduler:
    table = StepCostTable.unknown(config.max_num_seqs, config.max_num_batched_tokens)
    pacing = StepBudget(table, config.max_num_batched_tokens, config.target_inter_token_latency)
    return Scheduler(config, num_blocks, block_size, pacing)


def make_core(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    vocab_size: int = 1000,
    max_model_len: int = 128,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    enable_prefix_caching: bool = True,
    prompt_form_differs: bool = False,
    eos_token_ids: tuple[int, ...] = (),
    before_step: Callable[[SchedulerOutput], None] | None = None,
    pipeline_depth: int = 1,
    max_sampled_tokens: int = 1,
    windows: tuple[int | None, ...] = (None,),
    clock: Clock = time.monotonic,
) -> EngineCore:
    """An engine core over a simulated executor that holds it to its limits; one that queues steps where depth is 2."""
    executor = (CheckedExecutor if pipeline_depth == 1 else QueueingExecutor)(
        num_blocks,
        block_size,
        vocab_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        windows=windows,
        before_step=before_step,
    )
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
        facts=ModelFacts(prompt_form_differs=prompt_form_differs, kv_windows=windows),
        eos_token_ids=eos_token_ids,
        pipeline_depth=pipeline_depth,
        max_sampled_tokens=max_sampled_tokens,
    )
    return EngineCore(config, executor, clock=clock)


def simulated(core: EngineCore) -> CheckedExecutor:
    assert isinstance(core.executor, CheckedExecutor)
    return core.executor


def batches(core: EngineCore) -> list[dict[str, int]]:
    """Who ran in each step that computed something, in batch order, and for how many tokens."""
    return [
        dict(zip(plan.request_ids, plan.num_scheduled_tokens, strict=True))
        for plan in simulated(core).plans
        if plan.request_ids
    ]


def run_to_end(core: EngineCore, max_steps: int = 1000) -> dict[str, list[EngineCoreOutput]]:
    """Step until there is nothing to do; every request's outputs in order."""
    outputs: dict[str, list[EngineCoreOutput]] = defaultdict(list)
    for _ in range(max_steps):
        if not core.has_work:
            return outputs
        for output in core.step().outputs:
            outputs[output.request_id].append(output)
        core.scheduler.check_integrity()
    raise AssertionError(f"still work to do after {max_steps} steps")


def tokens_of(outputs: Sequence[EngineCoreOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


def assert_nothing_left(core: EngineCore) -> None:
    """All tables empty, every block without an owner, and no row left in the executor."""
    scheduler = core.scheduler
    scheduler.check_integrity()
    assert not scheduler.requests
    assert not scheduler.running
    assert not len(scheduler.waiting)
    assert not core.has_work
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
    assert scheduler.kv.usage == 0.0
    assert isinstance(core.executor, SimulatedExecutor)
    assert not core.executor.known_request_ids


def byte_level_tokenizer() -> Tokenizer:
    """GPT-2's kind with the bytes as its vocabulary, a few merges, and ids 256 to 258 special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "a"), ("ã", "ģ"), ("ð", "Ł"), ("ðŁ", "ĺ")]
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = [*alphabet, *specials, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """Llama 2's kind: U+2581 for spaces, characters outside the vocabulary in `<0xHH>` byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghi.,é"]
    merges = [("a", "b"), ("▁", "a"), ("▁a", "b"), ("▁", "▁")]
    vocabulary = [*pieces, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(vocabulary)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


class RecordingObserver(Observer):
    """Remembers everything."""

    def __init__(self) -> None:
        self.finished: list[FinishedRequest] = []
        self.stats: list[SchedulerStats] = []
        self.generated_tokens = 0
        self.prompt_tokens = 0
        self.num_first_tokens = 0
        self.num_inter_tokens = 0

    def on_step(self, stats: SchedulerStats, generated_tokens: int) -> None:
        self.stats.append(stats)
        self.generated_tokens += generated_tokens

    def on_prompt(self, tokens: int) -> None:
        self.prompt_tokens += tokens

    def on_first_token(self, seconds: float) -> None:
        self.num_first_tokens += 1

    def on_inter_token(self, seconds: float, count: int) -> None:
        self.num_inter_tokens += count

    def on_request_finished(self, finished: FinishedRequest) -> None:
        self.finished.append(finished)


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, token
    return token_id


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that another thread does; the test's own timeout is the limit."""
    while not condition():  # noqa: ASYNC110 - a thread cannot set an anyio.Event
        await anyio.sleep(0.001)


def count_wake_ups(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that gains an entry each time a channel made from now on asks its loop to wake up."""
    wake_ups: list[None] = []
    original = threadsafe_call_soon

    def counting() -> Callable[[Callable[[], None]], Any]:
        call_soon = original()

        def count(function: Callable[[], None]) -> Any:
            wake_ups.append(None)
            return call_soon(function)

        return count

    monkeypatch.setattr(engine.transport.channel, "threadsafe_call_soon", counting)
    return wake_ups
