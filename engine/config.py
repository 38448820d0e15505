"""The engine's configuration and the clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.messages import ModelFacts


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits and tokens that hold for the whole life of an engine.

    KV geometry (block size and count) and the vocabulary are not here: the executor knows them.
    """

    max_model_len: int  # maximum of prompt and output tokens of one request
    max_num_seqs: int = 64  # maximum of requests that run at the same time
    max_num_batched_tokens: int = 512  # token budget of one step
    max_sampled_tokens: int = 1  # per request and step; above 1 if the executor verifies draft tokens
    target_inter_token_latency: float = 0.08  # seconds; the prefill in steps that also decode is limited to keep it
    enable_prefix_caching: bool = True
    state_checkpoint_interval: int = 1024  # tokens (`engine.scheduler.checkpoints`)
    facts: ModelFacts = field(default_factory=ModelFacts)
    # Steps in flight. At 2 the device finds the next step waiting when one ends, so more would gain nothing.
    pipeline_depth: int = 1
    # Pipeline stages of the device, each of which computes a different plan. A request is in one plan at a time, so the
    # running requests are divided among as many plans as there are stages.
    num_stages: int = 1
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.pipeline_depth <= max(2, self.num_stages):
            raise ValueError(f"pipeline_depth must be 1 to {max(2, self.num_stages)}, got {self.pipeline_depth}.")
        if self.facts.state_bytes and (self.num_stages > 1 or self.max_sampled_tokens > 1):
            raise ValueError("A model with states takes one stage and one token per decode.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request decodes one token a step."
            )


Clock = Callable[[], float]
"""Seconds that never decrease. Code that needs the time gets a clock, so that a simulation can pass its own. Times that
are compared across processes need `time.monotonic`, which on Linux is one clock for all processes of a machine."""
