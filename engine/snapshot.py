"""What an engine looks like between two steps, for those who look after it: frozen data that is JSON as it stands.

Who makes it: `EngineCore.snapshot`, of what request, block pool and core say of themselves. Times are seconds of
`time.monotonic()`.
"""

from __future__ import annotations

import enum

import msgspec


class RequestSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One living request."""

    request_id: str
    tenant: str
    status: str  # "waiting", "running" or "preempted"
    priority: int
    arrival_time: float
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, which the prefix cache provided
    num_computed_tokens: int  # of prompt and output, without what is in flight
    num_output_tokens: int
    num_blocks: int  # in its block table, shared ones included
    num_preemptions: int


class BlocksSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The KV blocks by state (`engine.scheduler.block_pool`); the three make up all there are."""

    num_owned: int
    num_cached: int  # nobody's, but their content can still be found
    num_free: int
    by_ref_count: dict[int, int]  # of the owned ones: in how many block tables → how many blocks


class StepOutcome(enum.StrEnum):
    """What came of a step."""

    DONE = "done"
    ABANDONED = "abandoned"  # nobody was left who wanted it
    FAILED = "failed"


class StepSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One step that has ended: its plan and what it cost."""

    step: int
    time: float  # when it began
    seconds: float  # until its result was there
    outcome: StepOutcome
    num_requests: int
    num_prefill_tokens: int
    num_decode_tokens: int  # computed at positions that may all yield a token
    prefill_budget: int  # how many prefill tokens it might have carried beside decodes


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="engine_snapshot"):
    """Everything at one moment."""

    time: float
    num_steps: int  # that have ended
    num_steps_in_flight: int
    running: tuple[RequestSnapshot, ...]
    waiting: tuple[RequestSnapshot, ...]  # in the order in which they would run
    blocks: BlocksSnapshot
    steps: tuple[StepSnapshot, ...]  # the latest, oldest first
