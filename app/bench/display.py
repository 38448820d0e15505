"""What a terminal shows of a benchmark: a bar while it runs, a table at its end."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from app.bench.report import RequestRecord

SEGMENTS = ("receive", "tokenize", "queue", "prefill", "decode", "deliver")
SWITCH_SECONDS = 0.0001  # at most that long the thread that draws keeps the clocks waiting
NAMES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}
OF_THE_CLIENT = {
    "ttft_overhead": "Client minus server: TTFT",
    "client_send_lag": "Client: sent too late by",
    "client_loop_lag": "Client: event loop late by",
}


@contextmanager
def progress(num_requests: int, *, shown: bool = True) -> Iterator[Callable[[RequestRecord], None]]:
    """A bar of answered requests, with the speed and the failures so far; the block's value is told of each."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    num_tokens = num_failed = 0
    started = time.monotonic()
    try:
        with Progress(
            *columns, console=console, disable=not (shown and console.is_terminal), refresh_per_second=4
        ) as bars:
            task = bars.add_task("requests", total=num_requests)

            def answered(record: RequestRecord) -> None:
                nonlocal num_tokens, num_failed
                num_tokens += record.num_output_tokens
                num_failed += bool(record.error)
                said = f"{num_tokens / (time.monotonic() - started):.0f} tok/s"
                bars.update(task, advance=1, description=f"{said}, {num_failed} failed" if num_failed else said)

            yield answered
    finally:
        sys.setswitchinterval(before)


def print_result(result: dict[str, Any]) -> None:
    """The tables of a run, and what makes its figures doubtful."""
    console = Console()
    console.width = max(console.width, 100)  # of a file or a pipe: no table needs less
    facts = Table(show_header=False, box=None, padding=(0, 2))
    for name, value in facts_of(result):
        facts.add_row(name, value)
    console.print(facts)
    if not result["completed"]:
        return
    title, *columns = (rows := latencies_of(result))[0]
    latencies = Table(title, box=None, padding=(0, 2), header_style="bold")
    for column in columns:
        latencies.add_column(column, justify="right")
    for row in rows[1:]:
        latencies.add_row(*row)
    console.print(latencies)
    if "predicted" in result:
        table = Table("", *("measured", "predicted", "error"), box=None, padding=(0, 2), header_style="bold")
        for key, error in result["prediction_error"].items():
            table.add_row(key, f"{result[key]:,.2f}", f"{result['predicted'][key]:,.2f}", f"{100 * error:+.1f} %")
        console.print(table)
    for doubt in doubts_of(result):
        console.print(doubt, style="yellow", highlight=False)


def latencies_of(result: dict[str, Any]) -> list[list[str]]:
    """A row for each latency that the result tells of, under a row of titles."""
    suffix = next((f"_{name}_ms" for name in NAMES if f"mean_{name}_ms" in result), "_ms")
    percents = [key.removesuffix(suffix) for key in result if re.fullmatch(rf"p[\d.]+{suffix}", key)]
    columns = ["mean", "std", "median", *(percent for percent in percents if percent != "p50")]
    titles = NAMES | {f"server_{name}": f"  server: {name}" for name in SEGMENTS} | OF_THE_CLIENT
    rows = [["ms", *columns]]
    for name, title in titles.items():
        if f"mean_{name}_ms" in result:
            values = (result.get(f"{column}_{name}_ms") for column in columns)
            rows.append([title, *("" if value is None else f"{value:,.2f}" for value in values)])
    return rows


def facts_of(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Totals and rates, in words and figures. Failures are told beside what was answered."""
    messages = result["failure_messages"]
    failures = "; ".join(
        f"{count} x {why}" + (f" ({messages[why]})" if why in messages else "")
        for why, count in result["failures"].items()
    )
    waits = result["retry_after"]
    facts = [
        ("Answered", f"{result['completed']:,} in {result['duration']:.2f} s"),
        ("Failed", f"{result['failed']:,}" + (f": {failures}" if failures else "")),
        ("Refused", f"{result['refused']:,}" + (f", Retry-After {min(waits):g} to {max(waits):g} s" if waits else "")),
        ("Prompt tokens", f"{result['total_input_tokens']:,}, {result['total_cached_tokens']:,} of them cached"),
        ("Output tokens", f"{result['total_output_tokens']:,}"),
        ("Requests/s", f"{result['request_throughput']:.2f}"),
        ("Output tokens/s", f"{result['output_throughput']:,.1f}, {result['max_output_tokens_per_s']:,.0f} at best"),
        ("All tokens/s", f"{result['total_token_throughput']:,.1f}"),
        ("Under way at a time", f"at most {result['max_concurrent_requests']:,}"),
    ]
    if result["request_goodput"] is not None:
        facts.append(("Goodput, requests/s", f"{result['request_goodput']:.2f}"))
    return facts


def doubts_of(result: dict[str, Any]) -> list[str]:
    """What a reader should know before believing the figures."""
    doubts = []
    if result["failed"]:
        doubts.append(f"Latencies are of the {result['completed']} that were answered; {result['failed']} were not.")
    if number := result.get("requests_without_usage"):
        doubts.append(
            f"The server sent no usage for {number} requests: their prompt tokens are the planned ones, their output "
            "tokens one per event. Token counts, tokens/s and TPOT are estimates."
        )
    if result.get("client_was_late"):
        doubts.append(
            "The client, or the machine it runs on, was a bottleneck: its sends were late by "
            f"{result['p99_client_send_lag_ms']:.1f} ms, its event loop by {result['p99_client_loop_lag_ms']:.1f} ms "
            f"(p99), at {100 * result['client_cpu_share']:.0f} % of a processor. The figures tell of it as well."
        )
    if others := result.get("timelines_with_other_token_counts"):
        doubts.append(f"Of {others} requests the server counted other output tokens than it told its client.")
    return doubts
