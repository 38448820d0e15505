"""What an engine says of itself with every step, beside its outputs."""

from __future__ import annotations

import msgspec


class TierStats(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """What has happened in a tier of the KV cache since it was last told; `num_bytes` is a level."""

    tier: str  # "ram" or "disk"
    hit_tokens: int = 0  # that were loaded into the prefix cache
    failed_loads: int = 0  # pieces that were torn, foreign, or gone
    loaded_bytes: int = 0
    load_seconds: float = 0.0  # of reading, checking and copying
    stored_bytes: int = 0
    store_seconds: float = 0.0  # of writing, beside the steps
    num_bytes: int = 0  # held


class SchedulerStats(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """The stats after one step: levels, and from `num_preemptions` on what this step added."""

    step: int
    num_running: int
    num_waiting: int
    kv_cache_usage: float  # 0..1: share of blocks that requests own
    num_preemptions: int
    prompt_tokens: int  # prefilled: of prompts, and again of answers after a preemption
    prefix_cache_queries: int  # in tokens
    prefix_cache_hits: int  # in tokens
    num_changed_prefixes: int = 0  # prompts that repeat others but for their beginning
    tiers: list[TierStats] | None = None  # None where nothing has happened in them
    step_costs: bytes | None = None  # now and then, an `engine.scheduler.step_cost.StepCostTable` as JSON
    # Now and then, of each layer with experts since this was told before: their tokens, and how many times the mean of
    # them the most loaded one had.
    expert_load: list[tuple[int, float]] | None = None
    computed_tokens: int = 0  # all of the step, also for requests that have ended or were preempted meanwhile
