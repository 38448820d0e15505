"""A frame: what the page shows of one engine at one moment, as JSON (of `msgspec.json.encode`).

Live, frames come of the engine's snapshots a few times a second; a recorded file is frames, one a line, and so is what
the simulator makes. A frame tells of the steps that have ended since the frame before it, so frames that follow each
other tell of every step once:

    object    "frame"
    engine    number of the engine, 0 where there is one
    time      seconds of the engine's clock: the machine's monotonic one, or the simulation's
    limits    max_num_seqs, max_num_batched_tokens, target_inter_token_latency (seconds)
    requests  the ids that steps speak of: there they are numbers, indices into this list
    steps     those that have ended since the frame before, oldest first. Each has
                step     its number
                time     when it began
                seconds  until its result was there
                outcome  "done", "abandoned" or "failed"
                budget   how many prefill tokens it might have carried beside decodes
                rows     [request, tokens computed, tokens that might be sampled] of each request in it; one that has
                         more computed than sampled prefills, and with 0 sampled its prefill goes on
                left     [request, why] of each that lost its running slot or ended since the step before: "preempted",
                         "stop", "length", "abort", "error" or "timeout"
    running   the first MOST_REQUESTS that run, as `engine.snapshot.RequestSnapshot`
    waiting   the first MOST_REQUESTS that wait, in the order in which they would run; `waits_for` says why
    num_running, num_waiting   all of them
    tenants   `engine.snapshot.TenantSnapshot` of those that have most requests
    blocks    `engine.snapshot.BlocksSnapshot`: the KV blocks by state, and as a map
    service   what clients have seen since the frame before (`Service`), with the frame of the first engine only
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from engine.snapshot import EngineSnapshot, StepSnapshot

MOST_REQUESTS = 64

Frame = dict[str, Any]


class Service(TypedDict):
    """What clients have seen since the frame before."""

    first_tokens: list[float]  # seconds from arrival to first token, of each choice that got one
    refused: Mapping[str, int]  # requests by the limit that refused them


def make_frame(
    snapshot: EngineSnapshot, *, engine: int = 0, after_step: int = 0, service: Service | None = None
) -> Frame:
    """The frame of a snapshot. Steps up to number `after_step` are left out: a frame before has told of them."""
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
