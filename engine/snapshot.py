"""What an engine looks like between two steps, for those who look after it: frozen data that is JSON as it stands.

Who makes it: `EngineCore.snapshot`, of what request, block pool and core say of themselves. Times are seconds of
`time.monotonic()`.
"""

from __future__ import annotations

import enum

import msgspec


class WaitsFor(enum.StrEnum):
    """Why a waiting request does not run."""

    SLOT = "no slot"  # as many run as may
    BLOCKS = "no blocks"  # for its prompt, or for that of one before it
    LIMIT = "tenant at its limit"  # `max_running`
    SHARE = "tenant at its share"  # of the running slots, which are all taken
    GRAMMAR = "grammar compiling"
    COMPUTED = "prefix being computed"  # by another request
    LOADED = "prefix being loaded"  # from a tier
    STEP = "step budget"  # nothing but that: its turn comes


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
    waits_for: WaitsFor | None = None


class TenantSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant that has living requests."""

    tenant: str
    num_running: int
    num_waiting: int
    max_running: int  # 0: no limit
    served: float  # prompt tokens and twice the output tokens by its weight, from where it began to compete


class BlocksSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The KV blocks by state (`engine.scheduler.block_pool`); the three make up all there are."""

    num_owned: int
    num_cached: int  # nobody's, but their content can still be found
    num_free: int
    by_ref_count: dict[int, int]  # of the owned ones: in how many block tables → how many blocks
    # One character for every `map_stride` blocks, which says what the first is: "." free, "-" cached, "a" owned and
    # of the first KV group, "b" of the second and so on, in capitals where several requests share it.
    map: str
    map_stride: int


class StepOutcome(enum.StrEnum):
    """What came of a step."""

    DONE = "done"
    ABANDONED = "abandoned"  # nobody was left who wanted it
    FAILED = "failed"


class StepSnapshot(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One step that has ended: its plan and what it cost. The lists are the plan's own: keeping them costs nothing."""

    step: int
    time: float  # when it began
    seconds: float  # until its result was there
    outcome: StepOutcome
    num_requests: int
    num_prefill_tokens: int
    num_decode_tokens: int  # computed at positions that may all yield a token
    prefill_budget: int  # how many prefill tokens it might have carried beside decodes
    request_ids: list[str]
    num_scheduled_tokens: list[int]  # computed of each
    num_sampled_tokens: list[int]  # that might be sampled of each: 0 while its prefill goes on
    # Who lost its running slot or ended since the step before, and why: a `FinishReason`, or "preempted".
    left: tuple[tuple[str, str], ...]


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="engine_snapshot"):
    """Everything at one moment."""

    time: float
    seconds: float  # that it took to look
    max_num_seqs: int
    max_num_batched_tokens: int
    target_inter_token_latency: float
    num_steps: int  # that have ended
    num_steps_in_flight: int
    num_running: int
    num_waiting: int
    running: tuple[RequestSnapshot, ...]
    waiting: tuple[RequestSnapshot, ...]  # in the order in which they would run
    tenants: tuple[TenantSnapshot, ...]  # those that have most requests
    blocks: BlocksSnapshot
    steps: tuple[StepSnapshot, ...]  # the latest, oldest first
