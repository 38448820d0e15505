"""A result in a terminal and as an HTML page with plots.

Refusals and failures are shown next to every latency, because a server that refuses half of its requests is fast for
the others.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from app.workload.report import STEPS, RequestRecord, concurrency

WIDTH, HEIGHT = 560, 240  # of a plot, in pixels
LEFT, RIGHT, TOP, BOTTOM = 56, 40, 26, 24
MAX_POINTS = 2000  # of a line: more cannot be seen

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --dim: #6b7785; --rule: #d9dfe6; --blue: #2f6fb3; --red: #c0392b; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dde4ec; --dim: #94a1b0; --rule: #36414d; --blue: #72aae6; --red: #ef7a6d; }
  body { background: #161b21; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } figure { display: inline-block; margin: 0 1rem 1.5rem 0; max-width: 100%; }
figcaption { font-weight: 600; } small, .doubt, text { color: var(--dim); fill: var(--dim); font-size: 12px; }
table { display: inline-block; vertical-align: top; margin: 0 2rem 1rem 0; }
td { padding: 0 1.2rem 0 0; vertical-align: top; font-variant-numeric: tabular-nums; }
.doubt { color: var(--red); font-size: 14px; border: 1px solid; border-radius: 4px; padding: .4rem .8rem; }
.figures td + td { text-align: right; } .before { stroke-dasharray: 4 3; opacity: .6; }
svg { max-width: 100%; height: auto; } .rule { stroke: var(--rule); } .line { stroke: var(--blue); fill: none;
stroke-width: 1.5; } .dot { fill: var(--blue); fill-opacity: .55; } .bad { stroke: var(--red); stroke-width: 1.5; }
"""

Point = tuple[float, float]


class Plot(NamedTuple):
    """A line or dots, and red marks at the bottom for failed and refused requests."""

    title: str
    x_name: str
    y_name: str
    points: Sequence[Point]
    kind: Literal["line", "dots"] = "line"
    log_x: bool = False
    marks: Sequence[float] = ()
    beside: Sequence[Point] = ()  # a line of an earlier run


def page(result: dict[str, Any], records: Sequence[RequestRecord], beside: dict[str, Any] | None = None) -> str:
    """Return an HTML page that loads no other file. The other result is of an earlier run."""
    done = [record for record in records if not record.error]
    failed = [record for record in records if record.error]
    began = min((record.scheduled_time for record in records), default=0.0)
    missing = [record.start_time - began for record in failed]
    answers = [(r.start_time - began, 1e3 * r.ttft) for r in done]
    open_requests = [(time - began, float(number)) for time, number in concurrency(records)]
    plots = [
        _distribution(f"{NAMES['ttft']}, distribution", [r.ttft for r in done], (beside or {}).get("ttfts", ())),
        _distribution(
            f"{NAMES['itl']}, distribution",
            [gap for r in done for gap in r.itls],
            [gap for gaps in (beside or {}).get("itls", ()) for gap in gaps],
        ),
        Plot(f"{NAMES['ttft']} by the time of sending", "s", "ms", answers, "dots", marks=missing),
        Plot("Output tokens per second", "s", "tok/s", _rates(done, began), marks=missing),
        Plot("Concurrent requests", "s", "", _steps(open_requests), marks=missing),
    ]
    totals = f"{result['completed']:,} answered, {result['refused']:,} refused, {result['failed']:,} failed in all"
    facts = facts_beside(result, beside)
    facts += [[name.capitalize(), str(result[name])] for name in ("server", "machine", "command") if name in result]
    rows, figures = (
        "".join("<tr>" + "".join(f"<td>{escape(cell)}" for cell in cells) for cells in table)
        for table in (facts, latencies_beside(result, beside))
    )
    rows += f'</table><table class="figures">{figures}'
    doubts = "".join(f'<p class="doubt">{escape(doubt)}' for doubt in doubts_of(result))
    title = escape(f"{result.get('model_id', '')}, {result.get('date', '')}")
    figures = "".join(
        f"<figure><figcaption>{escape(plot.title)}</figcaption><small>{totals}</small><br>{_svg(plot)}</figure>"
        for plot in plots
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>{doubts}<table>{rows}</table><br>{figures}</html>"
    )


def _distribution(title: str, seconds: Sequence[float], beside: Sequence[float]) -> Plot:
    """Return the cumulative distribution of latencies, and of those of an earlier run."""
    one, other = (
        [(max(1e3 * value, 0.1), 100 * (rank + 1) / len(values)) for rank, value in enumerate(sorted(values))]
        for values in (seconds, beside)
    )
    return Plot(title, "ms", "% at most", one, log_x=True, beside=other)


def _rates(records: Sequence[RequestRecord], began: float) -> list[Point]:
    """Return output tokens per second in at most a hundred equal parts of the run, each at least 0.1 s long."""
    times = [(moment - began, r.num_output_tokens / len(r.token_times)) for r in records for moment in r.token_times]
    width = max(0.1, max((moment for moment, _ in times), default=0.0) / 100)
    parts = [0.0] * (int(max((moment for moment, _ in times), default=0.0) / width) + 1)
    for moment, tokens in times:
        parts[int(moment / width)] += tokens / width
    return [((number + 0.5) * width, rate) for number, rate in enumerate(parts)]


def _steps(points: Sequence[Point]) -> list[Point]:
    """Return the points of a line that keeps each value until the next."""
    return [
        p for (x, y), (after, _) in zip(points, [*points[1:], *points[-1:]], strict=True) for p in ((x, y), (after, y))
    ]


def _svg(plot: Plot) -> str:
    points, beside = (line[:: len(line) // MAX_POINTS + 1] for line in (plot.points, plot.beside))
    xs = [x for x, _ in (*points, *beside)] + list(plot.marks) or [0.0]
    low, high = (min(xs), max(xs)) if plot.log_x else (0.0, _nice(max(xs) or 1.0))
    top = max((y for _, y in points), default=0.0) or 1.0
    if plot.log_x:
        low, high = 10 ** math.floor(math.log10(low or 1e-3)), 10 ** math.ceil(math.log10(high or 1.0))
    high = high if high > low else low + 1.0
    top = 100.0 if plot.y_name.startswith("%") else _nice(top)

    def across(x: float) -> float:
        share = math.log(x / low) / math.log(high / low) if plot.log_x else (x - low) / (high - low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        return HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    decades = [10.0**n for n in range(round(math.log10(low)), round(math.log10(high)) + 1)] if plot.log_x else []
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="{escape(plot.title)}">']
    for y in (top * n / 4 for n in range(5)):
        parts.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down(y):.1f}" y2="{down(y):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down(y) + 4:.1f}" text-anchor="end">{_figure(y)}</text>')
    parts += [
        f'<text x="{across(x):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{_figure(x)}</text>'
        for x in decades or [low + (high - low) * n / 4 for n in range(5)]
    ]
    parts.append(f'<text x="{WIDTH}" y="{HEIGHT - BOTTOM}" text-anchor="end">{plot.x_name}</text>')
    parts.append(f'<text x="0" y="12">{plot.y_name}</text>')
    if plot.kind == "line":
        for style, line in (("line", points), ("line before", beside)):
            path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in line)
            parts.append(f'<polyline class="{style}" points="{path}"/>')
    else:
        parts += [f'<circle class="dot" cx="{across(x):.1f}" cy="{down(y):.1f}" r="2"/>' for x, y in points]
    floor = HEIGHT - BOTTOM
    for number, percent in enumerate((50, 90, 99) if plot.log_x and plot.points else ()):
        x = next(x for x, y in plot.points if y >= percent)
        parts.append(f'<path class="rule" d="M{across(x):.1f} {TOP}V{floor}"/>')
        place = 'text-anchor="end" dx="-6"' if across(x) > WIDTH - RIGHT - 60 else ""
        at = f'x="{across(x) + 3:.1f}" y="{floor - 6 - 14 * number}"'
        parts.append(f"<text {at} {place}>p{percent} {_figure(x)}</text>")
    parts += [f'<path class="bad" d="M{across(x):.1f} {floor}v-8"/>' for x in list(plot.marks)[:MAX_POINTS]]
    return "".join(parts) + "</svg>"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _nice(value: float) -> float:
    power = 10 ** math.floor(math.log10(value))
    return next(step * power for step in (1.0, 1.2, 1.6, 2.0, 4.0, 8.0, 12.0) if step * power >= value * 0.999999)


# -------------------------------------------------------------------------------------------------------------- display
# A benchmark in a terminal: a progress bar, and tables at the end.


SEGMENTS = ("receive", "tokenize", "queue", "prefill", "decode", "deliver")
SWITCH_SECONDS = 0.0001  # the longest time for which the drawing thread delays the measurement
NAMES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
    "load_wait": "Wait for the model to load",
}
OF_THE_CLIENT = {
    "ttft_overhead": "Client minus server: TTFT",
    "client_send_lag": "Client: sent too late by",
    "client_loop_lag": "Client: event loop late by",
}


@contextmanager
def progress(num_requests: int, *, shown: bool = True) -> Iterator[Callable[[RequestRecord], None]]:
    """Show a progress bar with the speed and the failures so far; call the block's value with each record."""
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


def print_result(result: dict[str, Any], beside: dict[str, Any] | None = None) -> None:
    """Print the tables of a run and its warnings, with those of an earlier run."""
    console = Console(markup=False)  # an error of a server may have brackets
    console.width = max(console.width, 100)  # files and pipes too: the tables need 100 columns
    facts = Table(show_header=False, box=None, padding=(0, 2))
    for row in facts_beside(result, beside):
        facts.add_row(*row)
    console.print(facts)
    if not result["completed"]:
        return
    title, *columns = (rows := latencies_beside(result, beside))[0]
    latencies = Table(title, box=None, padding=(0, 2), header_style="bold")
    for column in columns:
        latencies.add_column(column, justify="right")
    for row in rows[1:]:
        latencies.add_row(*row)
    console.print(latencies)
    if "predicted" in result:
        console.print(f"Predicted by the step costs before the run, {result['predicted_from']}", highlight=False)
        table = Table("", *("measured", "predicted", "error"), box=None, padding=(0, 2), header_style="bold")
        for key, error in result["prediction_error"].items():
            table.add_row(key, f"{result[key]:,.2f}", f"{result['predicted'][key]:,.2f}", f"{100 * error:+.1f} %")
        console.print(table)
    for doubt in doubts_of(result):
        console.print(doubt, style="yellow", highlight=False)


def facts_beside(result: dict[str, Any], beside: dict[str, Any] | None) -> list[list[str]]:
    """Return a row for each fact of the result, with that of an earlier run if there is one."""
    if beside is None:
        return [[name, value] for name, value in facts_of(result)]
    earlier = dict(facts_of(beside))
    rows = [[name, value, earlier.get(name, "")] for name, value in facts_of(result)]
    return [["", str(result.get("date", "")), f"before: {beside.get('date', '')}"], *rows]


def latencies_beside(result: dict[str, Any], beside: dict[str, Any] | None) -> list[list[str]]:
    """Return the rows of `latencies_of`, each followed by that of an earlier run if there is one."""
    titles, *rows = latencies_of(result)
    earlier = {} if beside is None else {row[0]: row for row in latencies_of(beside, titles[1:])[1:]}
    pairs = [[row, ["  before", *earlier[row[0]][1:]]] if row[0] in earlier else [row] for row in rows]
    return [titles, *(row for pair in pairs for row in pair)]


def latencies_of(result: dict[str, Any], columns: Sequence[str] = ()) -> list[list[str]]:
    """Return a row of titles and a row for each latency of the result."""
    suffix = next((f"_{name}_ms" for name in NAMES if f"mean_{name}_ms" in result), "_ms")
    percents = [key.removesuffix(suffix) for key in result if re.fullmatch(rf"p[\d.]+{suffix}", key)]
    columns = columns or ["mean", "std", "median", *(percent for percent in percents if percent != "p50")]
    titles = NAMES | {f"server_{name}": f"  server: {name}" for name in SEGMENTS} | OF_THE_CLIENT
    rows = [["ms", *columns]]
    for name, title in titles.items():
        if f"mean_{name}_ms" in result:
            values = (result.get(f"{column}_{name}_ms") for column in columns)
            rows.append([title, *("" if value is None else f"{value:,.2f}" for value in values)])
    return rows


def facts_of(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return totals and rates with their titles, failures and refusals included."""
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
        ("Output tokens/s", f"{result['output_throughput']:,.1f}, peak {result['max_output_tokens_per_s']:,.0f}"),
        ("Total tokens/s", f"{result['total_token_throughput']:,.1f}"),
        ("Peak concurrency", f"{result['max_concurrent_requests']:,} requests"),
    ]
    if result["request_goodput"] is not None:
        facts.append(("Goodput, requests/s", f"{result['request_goodput']:.2f}"))
    return facts


def doubts_of_steps(result: Mapping[str, Any]) -> list[str]:
    """Return warnings about the step costs of a simulation."""
    doubts = []
    found = result.get("unmeasured") or {}
    if (share := sum(each[1] for each in found.values())) > 0.01:
        sizes = ", ".join(f"{STEPS[name]} up to {largest:,} tokens" for name, (largest, _) in found.items())
        doubts.append(f"{100 * share:.0f} % of the steps' time is of sizes that the table never measured: {sizes}.")
    if not result.get("has_spread", True):
        doubts.append(
            "The table of step costs has no spread: tails are not predicted, high percentiles come out too low."
        )
    return doubts


def doubts_of(result: dict[str, Any]) -> list[str]:
    """Return warnings about the figures."""
    doubts = doubts_of_steps(result)
    if "stopped_by" in result:
        left_out = result.get("num_prompts", 0) - result["completed"] - result["failed"]
        doubts.append(f"The run was stopped: {left_out} requests are left out, not sent or in flight at that time.")
    cached, prompt = result["total_cached_tokens"], result["total_input_tokens"]
    if cached > 0.1 * prompt and result.get("dataset_name") in ("random", "sharegpt", "custom"):  # not of a simulation
        doubts.append(
            f"{100 * cached / prompt:.0f} % of the prompt tokens came from the prefix cache, as in a second run with "
            "the same --seed. To measure without it: another --seed, or POST /reset_prefix_cache before the run."
        )
    if result["failed"]:
        doubts.append(f"Latencies are of the {result['completed']} answered requests; {result['failed']} failed.")
    if number := result.get("requests_without_usage"):
        doubts.append(
            f"The server sent no usage for {number} requests: their prompt tokens are the planned ones, their output "
            "tokens one per event. Token counts, tokens/s and TPOT are estimates."
        )
    if result.get("client_was_late"):
        doubts.append(
            f"The {'client' if result['client_cpu_share'] > 0.5 else 'machine of the client'} was too busy, which may "
            "distort latencies by as much: sends were late by "
            f"{result['p99_client_send_lag_ms']:.1f} ms, its event loop by {result['p99_client_loop_lag_ms']:.1f} ms "
            f"(p99), at {100 * result['client_cpu_share']:.0f} % of a processor."
        )
    if others := result.get("timelines_with_other_token_counts"):
        doubts.append(f"For {others} requests the server's timeline and the usage have different output tokens.")
    return doubts
