"""`headrace top`: watches a running server in a terminal.

Once a second it reads `/metrics` and, with an admin key, `/engine_state`. Without an admin key, and for other servers
with vLLM's metrics, it shows figures but no requests.
"""

from __future__ import annotations

import math
import os
import select
import sys
import termios
import time
import tty
from argparse import ArgumentParser
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from app.client import ServerClient, ServerError, printable
from app.config.settings import Settings, SettingsError
from app.observability.frames import Frame, make_frame
from engine.snapshot import BlocksSnapshot, EngineSnapshot, RequestSnapshot

MAX_INTERVAL = 3600.0  # seconds
_ALWAYS_THERE = "num_requests_running"  # the metrics of every server have it
_TIMEOUT = 15.0  # seconds; an engine may take ten for a step
_HEIGHTS = "▁▂▃▄▅▆▇█"
Counted = defaultdict[str, float]

_NO_ADMINS = "The server has no admin_keys (HEADRACE_ADMIN_KEYS), so only /dashboard shows its requests."
_NO_ADMIN = "To see requests, give one of the server's admin_keys (HEADRACE_ADMIN_KEYS)."


def add_flags(parser: ArgumentParser) -> None:
    watch = parser.add_argument_group("what is watched")
    watch.add_argument("--url", help="The server. Default: this machine, at the port of the settings.")
    watch.add_argument("--api-key", help="The server's API key. Default: the first of api_keys and of admin_keys.")
    watch.add_argument("--interval", type=float, default=1.0, help="Seconds between two updates. Default: 1.")
    watch.add_argument("--once", action="store_true", help="Print once and end, as without a terminal.")


def run(settings: Settings, *, url: str | None, api_key: str | None, interval: float, once: bool) -> int:
    """Show the server's state until `q` is pressed. Raises ServerError if the first request fails."""
    own, admin = (keys[0].get_secret_value() if keys else None for keys in (settings.api_keys, settings.admin_keys))
    here = f"{'http' if settings.ssl_certfile is None else 'https'}://127.0.0.1:{settings.port}"
    watcher = Watcher(url or here, api_key or own, admin or api_key)
    if not 0 < interval <= MAX_INTERVAL:
        raise SettingsError(f"--interval: got {interval:g}; allowed: seconds, more than 0 and at most {MAX_INTERVAL:g}")
    interval = max(interval, 0.1)
    console = Console() if sys.stdout.isatty() else Console(width=120)
    before = look = watcher.look()
    if once or not (console.is_terminal and sys.stdin.isatty()):
        time.sleep(interval)
        console.print(page(watcher.url, watcher.look(), before, most_requests=64))
        return 0
    with Live(console=console, screen=True, auto_refresh=False) as live, _pressed_keys() as pressed:
        while True:
            live.update(page(watcher.url, look, before, most_requests=console.height), refresh=True)
            if "q" in pressed(interval):
                return 0
            before, look = look, watcher.look_again(look)


@dataclass(frozen=True, kw_only=True)
class Look:
    """A server's state at one time. `counted` has the samples of its metrics by name, and by name and reason."""

    time: float
    counted: Counted
    frames: tuple[Frame, ...] = ()
    trouble: str = ""


class Watcher:
    """Polls the state of one server. Each `Look` (a snapshot) has the engine steps since the one before it."""

    def __init__(self, url: str, api_key: str | None, admin_key: str | None) -> None:
        self.url = url
        self._client = ServerClient(url, api_key, timeout=_TIMEOUT)
        self._admin = ServerClient(url, admin_key, timeout=_TIMEOUT)
        self._last_steps: dict[int, int] = {}

    def look(self) -> Look:
        """Read the state. Raises `ServerError`, but not if only the requests cannot be read."""
        with self._client.understood():
            counted = _counted(self._client.get("/metrics").decode())
        try:
            frames = tuple(self._frames(self._admin.get("/engine_state")))
        except ServerError as error:
            if error.status not in (401, 404, 503):
                raise
            trouble = str(error) if error.status == 503 else _NO_ADMIN if error.status == 401 else _NO_ADMINS
            return Look(time=time.monotonic(), counted=counted, trouble=trouble)
        return Look(time=time.monotonic(), counted=counted, frames=frames)

    def look_again(self, last: Look) -> Look:
        """Read the state, or return the `last` one with the error."""
        try:
            return self.look()
        except ServerError as error:
            return Look(time=last.time, counted=last.counted, frames=last.frames, trouble=str(error))

    def _frames(self, state: bytes) -> Iterator[Frame]:
        try:
            engines = msgspec.json.decode(state, type=dict[str, dict[int, EngineSnapshot]])["engines"]
        except (msgspec.DecodeError, KeyError) as error:
            raise ServerError(f"{self.url} is of another version: {error}") from error
        for number, snapshot in engines.items():
            last = self._last_steps.get(number, 0)
            # A restarted server counts from 0.
            yield make_frame(snapshot, engine=number, after_step=last if last <= snapshot.num_steps else 0)
            self._last_steps[number] = max((step.step for step in snapshot.steps), default=0)


def _counted(text: str) -> Counted:
    counted: Counted = defaultdict(float)
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = (sample.name.removesuffix(_ALWAYS_THERE) for sample in samples if sample.name.endswith(_ALWAYS_THERE))
    prefix = min(found, key=len, default="")  # `metrics_prefix` of that server
    for sample in samples:
        if math.isfinite(sample.value):
            name = sample.name.removeprefix(prefix).rpartition(":")[2]
            counted[name] += sample.value
            if reason := sample.labels.get("reason") or sample.labels.get("source"):
                counted[f"{name} {reason}"] += sample.value
    return counted


def page(url: str, look: Look, before: Look, *, most_requests: int) -> RenderableType:
    """Render the state; rates are since `before`."""
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="bold", min_width=9, no_wrap=True)
    lines.add_column(no_wrap=True)
    for name, text in _figures(look, before):
        lines.add_row(name, text)
    for frame in look.frames:
        number = f" {frame['engine']}" if len(look.frames) > 1 else ""
        lines.add_row(f"KV blocks{number}", _blocks(frame["blocks"]))
        lines.add_row(f"steps{number}", _steps(frame["steps"], frame["limits"]["target_inter_token_latency"]))
        lines.add_row(f"batch{number}", _batch(frame["steps"], frame["limits"]))
    title = Text.assemble(("headrace top", "bold"), f"  {url}  {time.strftime('%H:%M:%S')}  ", ("q quits", "dim"))
    trouble = [Text(look.trouble, style="red")] if look.trouble else []
    return Group(title, *trouble, lines, *_tenants(look.frames), *_requests(look.frames, most_requests))


def _figures(look: Look, before: Look) -> Iterator[tuple[str, str]]:
    now, seconds = look.counted, look.time - before.time
    # A restarted server has lower counts than before.
    new = {key: max(value - before.counted[key], 0.0) for key, value in now.items()}

    def rate(name: str) -> str:
        return f"{new.get(name, 0.0) / seconds:,.1f}" if seconds > 0 else "–"

    def mean(name: str) -> str:
        count = new.get(f"{name}_count", 0.0)
        return f"{1e3 * new[f'{name}_sum'] / count:,.1f} ms" if count else "–"

    rejected = "admission_rejections_total"
    reasons = [f"{int(n)} {key.partition(' ')[2]}" for key, n in now.items() if key.startswith(f"{rejected} ") and n]
    running, waiting = int(now["num_requests_running"]), int(now["num_requests_waiting"])
    yield "requests", f"{running} running, {waiting} waiting; {rate('request_success_total')} ended/s"
    yield "refused", f"{rate(rejected)}/s; since its start {', '.join(reasons) or 'none'}"
    computed = rate("prompt_tokens_by_source_total local_compute")
    yield "tokens", f"{rate('generation_tokens_total')} generated/s, {computed} of prompts computed/s"
    first, gap = mean("time_to_first_token_seconds"), mean("inter_token_latency_seconds")
    yield "latency", f"{first} to the first token, {gap} between tokens"


def _blocks(blocks: BlocksSnapshot) -> Text:
    total = max(blocks.num_owned + blocks.num_cached + blocks.num_free, 1)
    owned, cached = (round(40 * number / total) for number in (blocks.num_owned, blocks.num_cached))
    shared = sum(number for count, number in blocks.by_ref_count.items() if count > 1)
    return Text.assemble(
        ("█" * owned, "green"),
        ("▒" * cached, "yellow"),
        "·" * (40 - owned - cached),
        f"  {blocks.num_owned:,} owned ({shared:,} shared), {blocks.num_cached:,} cached, {blocks.num_free:,} free",
    )


def _steps(steps: list[dict[str, Any]], target: float) -> Text:
    if not steps:
        return Text("none since the last look", style="dim")
    seconds = [step["seconds"] for step in steps]
    tall = [min(int(7 * each / target), 7) for each in seconds[-32:]]
    return Text.assemble(
        *((_HEIGHTS[height], "red" if height == 7 else "green") for height in tall),
        f"  {1e3 * sum(seconds) / len(steps):.1f} ms each, {1e3 * max(seconds):.1f} at most, of {1e3 * target:.0f}",
    )


def _batch(steps: list[dict[str, Any]], limits: dict[str, Any]) -> str:
    rows = [row for step in steps for row in step["rows"]]
    prefill = sum(computed for _, computed, sampled in rows if computed > sampled)
    of = max(len(steps), 1)
    return (
        f"{len(rows) / of:.1f} of {limits['max_num_seqs']} requests and "
        f"{prefill / of:.1f} of {limits['max_num_batched_tokens']} prefill tokens in a step"
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="reverse", expand=True)
    for name in columns:
        # In a narrow terminal names are cut.
        is_name = name in ("request", "tenant")
        table.add_column(name, justify="left" if is_name or name == "state" else "right", no_wrap=not is_name)
    return table


def _name(text: str) -> Text:
    short = text if len(text) <= 24 else f"{text[:16]}…{text[-7:]}"
    return Text(printable(short) or "–", no_wrap=True, overflow="ellipsis")


def _tenants(frames: tuple[Frame, ...]) -> Iterator[Table]:
    running: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    for frame in frames:
        for tenant in frame["tenants"]:
            running[tenant.tenant] += tenant.num_running
            waiting[tenant.tenant] += tenant.num_waiting
    table = _table("tenant", "running", "waiting")
    for name, _ in (running + waiting).most_common(5):
        table.add_row(_name(name), str(running[name]), str(waiting[name]))
    if table.row_count > 1 or waiting.total():
        yield table


def _requests(frames: tuple[Frame, ...], most: int) -> Iterator[Table]:
    table = _table("request", "tenant", "state", "prompt", "cached", "output", "blocks", "seconds")
    listed = [(frame["time"], each) for part in ("running", "waiting") for frame in frames for each in frame[part]]
    for now, each in listed[:most]:
        numbers = (each.num_prompt_tokens, each.num_cached_tokens, each.num_output_tokens, each.num_blocks)
        cells = (*map(str, numbers), f"{now - each.arrival_time:.1f}")
        table.add_row(_name(each.request_id), _name(each.tenant), _state(each), *cells)
    if listed:
        yield table


def _state(request: RequestSnapshot) -> Text:
    again = f", preempted {request.num_preemptions}" if request.num_preemptions else ""
    if request.status != "running":
        return Text(f"{request.waits_for or 'waits'}{again}", style="yellow")
    if request.num_computed_tokens < request.num_prompt_tokens:
        share = 100 * request.num_computed_tokens // request.num_prompt_tokens
        return Text(f"prefill {share} %{again}", style="cyan")
    return Text(f"decode{again}", style="green")


@contextmanager
def _pressed_keys() -> Iterator[Callable[[float], str]]:
    """Provide a function that waits for at most the given seconds and returns the pressed keys."""
    keyboard = sys.stdin.fileno()

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([keyboard], [], [], seconds)
        return os.read(keyboard, 64).decode("utf-8", "replace").lower() if ready else ""

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield pressed
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
