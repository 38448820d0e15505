"""Frames: the state of one engine at one moment, as JSON (by `msgspec.json.encode`).

The live page gets frames made from the engine's snapshots, a few times a second; a recording and a simulation have one
frame per line. A frame has the steps that ended since the previous frame, so a sequence of frames has each step once:

    object    "frame"
    engine    number of the engine, 0 where there is one
    time      seconds of the engine's clock: the machine's monotonic one, or the simulation's
    limits    max_num_seqs, max_num_batched_tokens, target_inter_token_latency (seconds)
    requests  the ids of requests; steps have indices into this list
    steps     the steps that ended since the previous frame, oldest first. Each has
                step     its number
                time     when it began
                seconds  until its result
                outcome  "done", "abandoned" or "failed"
                budget   the number of prefill tokens that fit into it in addition to decodes
                rows     [request, tokens computed, tokens sampled at most] of each request in it; a request with more
                         computed than sampled is in prefill, and with 0 sampled its prefill continues
                left     [request, reason] of each request that lost its running slot or ended since the previous step:
                         "preempted", "stop", "length", "abort", "error" or "timeout"
    running   the first MOST_REQUESTS running requests, as `engine.snapshot.RequestSnapshot`
    waiting   the first MOST_REQUESTS waiting requests, in the order in which they would run; `waits_for` has the reason
    num_running, num_waiting   the numbers of all running and waiting requests
    oldest_wait   seconds since the earliest arrival of a waiting request that never ran, null if there is none
    tenants   `engine.snapshot.TenantSnapshot` of the tenants with most requests
    blocks    `engine.snapshot.BlocksSnapshot`: the KV blocks by state, and as a map
    service   TTFTs and refusals since the previous frame (`Service`), in frames of the first engine only
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from engine.snapshot import EngineSnapshot, StepSnapshot

MOST_REQUESTS = 64

Frame = dict[str, Any]


class Service(TypedDict):
    """TTFTs and refusals since the previous frame."""

    first_tokens: list[float]  # seconds from arrival to first token of each choice that got one
    refused: Mapping[str, int]  # the number of refused requests by limit


def make_frame(
    snapshot: EngineSnapshot, *, engine: int = 0, after_step: int = 0, service: Service | None = None
) -> Frame:
    """Make the frame of a snapshot, without the steps up to number `after_step`, which are in an earlier frame."""
    numbers: dict[str, int] = {}
    steps = [_step(step, numbers) for step in snapshot.steps if step.step > after_step]
    return {
        "object": "frame",
        "engine": engine,
        "time": snapshot.time,
        "limits": {
            "max_num_seqs": snapshot.max_num_seqs,
            "max_num_batched_tokens": snapshot.max_num_batched_tokens,
            "target_inter_token_latency": snapshot.target_inter_token_latency,
        },
        "requests": list(numbers),
        "steps": steps,
        "running": snapshot.running,
        "waiting": snapshot.waiting,
        "tenants": snapshot.tenants,
        "blocks": snapshot.blocks,
        "num_running": snapshot.num_running,
        "num_waiting": snapshot.num_waiting,
        "oldest_wait": snapshot.oldest_wait,
        "service": service,
    }


def _step(step: StepSnapshot, numbers: dict[str, int]) -> dict[str, Any]:
    def number(request_ids: Iterable[str]) -> list[int]:
        return [numbers.setdefault(request_id, len(numbers)) for request_id in request_ids]

    rows = zip(number(step.request_ids), step.num_scheduled_tokens, step.num_sampled_tokens, strict=True)
    left = zip(number(request_id for request_id, _ in step.left), (why for _, why in step.left), strict=True)
    return {
        "step": step.step,
        "time": step.time,
        "seconds": step.seconds,
        "outcome": step.outcome,
        "budget": step.prefill_budget,
        "rows": list(rows),
        "left": list(left),
    }
