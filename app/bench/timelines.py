"""What a server of this kind says of the same requests: where the time went, and where client and server disagree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from app.bench.connection import ConnectionPool
from app.bench.report import RequestRecord, statistics

MAX_LOOKUPS = 200  # of a run, evenly spread over the last that the server may remember
REMEMBERED = 1000
_BEFORE_FIRST_TOKEN = ("receive", "tokenize", "queue", "prefill")


async def compare_with_server(pool: ConnectionPool, records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Client's minus server's TTFT and time of the whole request; nothing where the server keeps no timelines.

    The difference of TTFT is the network, the sending and what the client itself adds. The server's medians of each
    segment say what a first token waits for.
    """
    done = [record for record in records if not record.error][-REMEMBERED:]
    overheads: dict[str, list[float]] = {"ttft_overhead": [], "e2el_overhead": []}
    segments: dict[str, list[float]] = {}
    disagreeing = 0
    for record in done[:: -(-len(done) // MAX_LOOKUPS) or 1]:
        timeline = await pool.get_json(f"/v1/requests/{quote(record.request_id, safe='')}/timeline")
        try:
            seconds = {str(segment["name"]): float(segment["seconds"]) for segment in timeline["segments"]}
            whole, num_output_tokens = float(timeline["seconds"]), timeline["output_tokens"]
        except (TypeError, LookupError, ValueError):
            break  # another server, or it has forgotten
        overheads["ttft_overhead"].append(record.ttft - sum(seconds.get(name, 0.0) for name in _BEFORE_FIRST_TOKEN))
        overheads["e2el_overhead"].append(record.end_time - record.start_time - whole)
        disagreeing += num_output_tokens != record.num_output_tokens
        for name, value in seconds.items():
            segments.setdefault(name, []).append(value)
    compared = len(overheads["ttft_overhead"])
    if not compared:
        return {}
    result: dict[str, Any] = {"timelines_compared": compared, "timelines_with_other_token_counts": disagreeing}
    for name, values in (overheads | {f"server_{name}": values for name, values in segments.items()}).items():
        result |= statistics(name, values, (50, 99))
    return result
