"""A snapshot of an engine between two steps, for operators: frozen data that can be sent as JSON.

`EngineCore.snapshot` makes it. Times are seconds of `time.monotonic()`.
"""

from __future__ import annotations

import enum

import msgspec


class WaitsFor(enum.StrEnum):
    """The reason why a waiting request does not run."""

    SLOT = "no slot"  # all running slots are taken
    BLOCKS = "no blocks"  # too few for its prompt, or for the prompt of a request before it
    LIMIT = "tenant at its limit"  # `max_running`
    SHARE = "tenant at its share"  # of the running slots, all of which are taken
    GRAMMAR = "grammar compiling"
    COMPUTED = "prefix being computed"  # by another request
    LOADED = "prefix being loaded"  # from a tier
    STEP = "step budget"  # only the token budget: it will run in one of the next steps


class RequestSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has not ended."""

    request_id: str
    tenant: str
    status: str  # "waiting", "running" or "preempted"
    priority: int
    arrival_time: float
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, from the prefix cache
    num_computed_tokens: int  # of prompt and output, without what is in flight
    num_output_tokens: int
    num_blocks: int  # in its block table, shared ones included
    num_preemptions: int
    waits_for: WaitsFor | None = None


class TenantSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant with requests that have not ended."""

    tenant: str
    num_running: int
    num_waiting: int
    max_running: int  # 0: no limit
    served: float  # (prompt tokens + 2 * output tokens) / weight; see `TenantShares`


class BlocksSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The KV blocks by state (`engine.scheduler.block_pool`). The three states make up all blocks."""

    num_owned: int
    num_cached: int  # without an owner, with content that can still be found
    num_free: int
    by_ref_count: dict[int, int]  # owned blocks: how many are in that many block tables
    # One character for every `map_stride` blocks, which shows the first of them: "." free, "-" cached, "a" owned in the
    # first KV group, "b" in the second and so on; a capital letter if several requests share the block.
    map: str
    map_stride: int


class StepOutcome(enum.StrEnum):
    """The end of a step."""

    DONE = "done"
    ABANDONED = "abandoned"  # all its requests were aborted
    FAILED = "failed"


class StepSnapshot(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The plan and the duration of a step that has ended. The lists are those of the plan, not copies."""

    step: int
    time: float  # when it began
    seconds: float  # from its start to its result
    outcome: StepOutcome
    num_requests: int
    num_prefill_tokens: int
    num_decode_tokens: int  # computed for requests that decode
    prefill_budget: int  # the maximum of prefill tokens in addition to the decodes
    request_ids: list[str]
    num_scheduled_tokens: list[int]  # computed of each
    num_sampled_tokens: list[int]  # the maximum to sample of each: 0 while its prefill goes on
    # Requests that ended or lost their running slot since the previous step, each with a `FinishReason` or "preempted".
    left: tuple[tuple[str, str], ...]


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="engine_snapshot"):
    """The state of an engine at one moment."""

    time: float
    seconds: float  # taken by the snapshot
    max_num_seqs: int
    max_num_batched_tokens: int
    target_inter_token_latency: float
    num_steps: int  # ended steps
    num_steps_in_flight: int
    num_running: int
    num_waiting: int
    oldest_wait: float | None = None  # seconds since the earliest arrival of those that never ran
    running: tuple[RequestSnapshot, ...]
    waiting: tuple[RequestSnapshot, ...]  # in the order in which they would run
    tenants: tuple[TenantSnapshot, ...]  # the tenants with most requests
    blocks: BlocksSnapshot
    steps: tuple[StepSnapshot, ...]  # the latest, oldest first
