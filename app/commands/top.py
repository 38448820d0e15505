"""`headrace top`: watches a running server in a terminal.

Once a second it reads `/metrics` and the dashboard's history; a thread follows the dashboard's frames. Both need an
admin key where the dashboard does. Without it, and for other servers with vLLM's metrics, it shows figures but no
requests, and sparklines of what it has seen itself.
"""

from __future__ import annotations

import math
import os
import re
import select
import signal
import sys
import termios
import time
import tty
from argparse import ArgumentParser
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from threading import Event, Thread
from typing import Any, TypedDict

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from app.client import ServerClient, ServerError, printable
from app.config.settings import Settings, SettingsError
from engine.snapshot import BlocksSnapshot, RequestSnapshot, TenantSnapshot

MAX_INTERVAL = 3600.0  # seconds
_ALWAYS_THERE = "num_requests_running"  # the metrics of every server have it
_TIMEOUT = 30.0  # seconds; a feed with nothing new sends a comment every fifteen
_RECENT = 5.0  # seconds of steps that are shown
_SLOT, _SLOTS = 5.0, 181  # seconds between two values of a history that is kept here, and their largest number
_SEEN = (
    *(_ALWAYS_THERE, "generation_tokens_total", "time_to_first_token_seconds_count"),
    "time_to_first_token_seconds_sum",
)
_HEIGHTS = "▁▂▃▄▅▆▇█"
_SORTS = ("", "tenant", "prompt", "cached", "output", "blocks", "seconds")  # "": in the order in which they run
_KEYS = re.compile(r"\x1b[\[o][ab]|.", re.DOTALL)  # an arrow, up or down, or one character
Counted = defaultdict[str, float]

_NO_ADMINS = "Requests cannot be aborted: the server has no admin_keys (HEADRACE_ADMIN_KEYS)."
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
    screen = Screen(watcher)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # gives the terminal back
    with Live(console=console, screen=True, auto_refresh=False) as live, _pressed_keys() as pressed:
        while True:
            until = time.monotonic() + interval
            while (left := until - time.monotonic()) > 0:
                shown = page(
                    watcher.url, look, before, most_requests=console.height, width=console.width, screen=screen
                )
                live.update(shown, refresh=True)
                if not screen.press(pressed(left), look):
                    return 0
            before, look = look, watcher.look_again(look)


class Frame(TypedDict, total=False):
    """The parts of one engine's frame that are shown; `app.observability.frames` describes them."""

    engine: int
    time: float
    limits: dict[str, float]
    steps: list[dict[str, Any]]
    running: list[RequestSnapshot]
    waiting: list[RequestSnapshot]
    tenants: list[TenantSnapshot]
    blocks: BlocksSnapshot
    oldest_wait: float | None


class Past(msgspec.Struct, frozen=True):
    """The parts of the dashboard's history that are shown."""

    version: str = ""
    seconds: float = 0.0  # since the server started
    models: list[dict[str, Any]] = []
    series: dict[str, dict[str, list[Any]]] = {}


NO_PAST = Past()


@dataclass(frozen=True, kw_only=True)
class Look:
    """A server's state at one time. `counted` has the samples of its metrics by name, and by name and reason."""

    time: float
    counted: Counted
    frames: tuple[Frame, ...] = ()
    past: Past = NO_PAST
    trouble: str = ""


class Watcher:
    """Polls the state of one server, and follows its frames on a thread."""

    def __init__(self, url: str, api_key: str | None, admin_key: str | None) -> None:
        self.url = url
        self._client = ServerClient(url, api_key, timeout=_TIMEOUT)
        self._admin = ServerClient(url, admin_key, timeout=_TIMEOUT)
        self._frames: dict[int, Frame] = {}  # by engine: the latest, with the recent steps
        self._seen: deque[tuple[float, ...]] = deque(maxlen=_SLOTS)  # times and metrics, if the server gives no past
        self._trouble = ""
        self._answered = Event()  # a frame has come, or the feed is refused
        self._thread = Thread(target=self._follow, daemon=True)

    def look(self) -> Look:
        """Read the state. Raises `ServerError`, but not if only the requests cannot be read."""
        with self._client.understood():
            counted = _counted(self._client.get("/metrics").decode())
        if not self._thread.is_alive():
            self._thread.start()
        self._answered.wait(2.0)
        try:
            past = msgspec.json.decode(self._admin.get("/dashboard/history"), type=Past)
        except (ServerError, msgspec.DecodeError):  # the feed has the reason, or it is another server
            past = self._past(time.monotonic(), counted)
        frames = tuple(self._frames[engine] for engine in sorted(self._frames))
        return Look(time=time.monotonic(), counted=counted, frames=frames, past=past, trouble=self._trouble)

    def _past(self, now: float, counted: Counted) -> Past:
        """Return the history that was seen here, with a value for every `_SLOT` seconds."""
        if not self._seen or now - self._seen[-1][0] >= _SLOT:
            self._seen.append((now, *(counted[name] for name in _SEEN)))
        series: dict[str, list[Any]] = {"running": [], "generated": [], "ttft_p99": []}
        for before, after in pairwise(self._seen):
            seconds, _, tokens, first, waited = (max(new - old, 0.0) for old, new in zip(before, after, strict=True))
            series["running"].append(after[1])
            series["generated"].append(tokens / seconds)
            series["ttft_p99"].append(waited / first if first else None)  # the mean: there are no buckets here
        return (
            NO_PAST
            if len(self._seen) < 2
            else Past(series={"": {name: [*values, None] for name, values in series.items()}})
        )

    def look_again(self, last: Look) -> Look:
        """Read the state, or return the `last` one with the error."""
        try:
            return self.look()
        except ServerError as error:
            return replace(last, trouble=str(error))

    def abort(self, request_id: str) -> str:
        """End a request. Return what became of that, in words."""
        try:
            with self._admin.request("POST", "/abort_requests", {"request_ids": [request_id]}) as response:
                return f"{request_id}: {'aborted' if b'1' in response.read() else 'has ended already'}"
        except ServerError as error:
            return _NO_ADMINS if error.status == 404 else str(error)

    def _follow(self) -> None:
        """Take frames as they come, for ever."""
        while True:
            try:
                with self._admin.request("GET", "/dashboard/frames") as response:
                    for line in response:
                        if line.startswith(b'data: {"object"'):
                            self._take(msgspec.json.decode(line[5:], type=Frame))
            except ServerError as error:
                self._trouble = {401: _NO_ADMIN, 404: ""}.get(error.status or 0, str(error))
            except (msgspec.DecodeError, KeyError) as error:
                self._trouble = f"{self.url} is of another version: {error}"
            self._answered.set()
            self._frames = {}
            time.sleep(1.0)

    def _take(self, frame: Frame) -> None:
        before = self._frames.get(frame["engine"], frame)
        steps = [*before["steps"], *frame["steps"]] if before["time"] < frame["time"] else frame["steps"]
        frame["steps"] = [step for step in steps if step["time"] > frame["time"] - _RECENT]
        self._frames = {**self._frames, frame["engine"]: frame}
        self._trouble = ""
        self._answered.set()


class Screen:
    """The state of the screen that keys change: the selected request, the order, and a question."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self.selected = ""
        self.sort = ""
        self.words = ""
        self._aborts = ""  # the request that `y` aborts

    def press(self, keys: str, look: Look) -> bool:
        """Obey keys. Return False for the one that ends the program."""
        for key in _KEYS.findall(keys):
            asked, self._aborts, self.words = self._aborts, "", ""
            listed = [each.request_id for _, each in _listed(look.frames, self.sort)]
            if asked:
                self.words = self._watcher.abort(asked) if key == "y" else f"{asked}: not aborted"
            elif key == "q":
                return False
            elif key == "s":
                self.sort = _SORTS[(_SORTS.index(self.sort) + 1) % len(_SORTS)]
            elif key == "a" and self.selected in listed:
                self._aborts = self.selected
                self.words = f"Abort {self.selected}? y: yes, any other key: no"
            elif len(key) == 3 and listed:
                at = listed.index(self.selected) if self.selected in listed else -1 if key[2] == "b" else len(listed)
                self.selected = listed[max(0, min(len(listed) - 1, at + (1 if key[2] == "b" else -1)))]
        return True


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


def page(
    url: str, look: Look, before: Look, *, most_requests: int, width: int = 120, screen: Screen | None = None
) -> RenderableType:
    """Render the state; rates are since `before`, sparklines of the last 15 minutes."""
    try:
        return _page(url, look, before, most_requests, width, screen)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        trouble = f"{url} is of another version: {error!r}"
        return _page(url, replace(look, frames=(), past=NO_PAST, trouble=trouble), before, most_requests, width, screen)


def _page(url: str, look: Look, before: Look, most_requests: int, width: int, screen: Screen | None) -> RenderableType:
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="bold", min_width=9, no_wrap=True)
    lines.add_column(no_wrap=True)
    past = next(iter(look.past.series.values()), {})
    for name, figure, text in _figures(look, before):
        values = past.get(figure, [])[:-1] if width >= 100 else []
        lines.add_row(name, Text.assemble((_sparkline(values), "cyan"), "  " if values else "", text))
    for frame in look.frames:
        number = f" {frame['engine']}" if len(look.frames) > 1 else ""
        lines.add_row(f"KV blocks{number}", _blocks(frame["blocks"]))
        lines.add_row(f"steps{number}", _steps(frame["steps"], frame["limits"]["target_inter_token_latency"]))
        lines.add_row(f"batch{number}", _batch(frame["steps"], frame["limits"]))
    keys = f"↑↓ select  s sort{f' ({screen.sort})' if screen and screen.sort else ''}  a abort  q quits"
    title = Text.assemble(("headrace top", "bold"), f"  {url}  {time.strftime('%H:%M:%S')}  ", (keys, "dim"))
    words = [Text(printable(text), style="red") for text in (look.trouble, screen.words if screen else "") if text]
    sort, selected = (screen.sort, screen.selected) if screen else ("", "")
    requests = _requests(look.frames, most_requests, sort, selected)
    return Group(title, *_served(look.past), *words, lines, *_tenants(look.frames), *requests)


def _served(past: Past) -> Iterator[Text]:
    if not past.models:
        return
    facts = [each["name"] for each in past.models] + [f"Headrace {past.version}"]
    facts.append(f"up {timedelta(seconds=int(past.seconds))}")
    if len(past.models) == 1 and "context" in (model := past.models[0]):
        facts += [model["device"], f"{model['threads']} threads", f"context {model['context']:,}"]
        facts.append(f"{model['slots']} slots")
    yield Text(printable(" · ".join(facts)), style="dim", no_wrap=True, overflow="ellipsis")


def _sparkline(values: list[float | None]) -> str:
    """Return a character for every four values, which is as high as the highest of them."""
    groups = [values[max(0, end - 4) : end] for end in range(len(values), 0, -4)][::-1]
    tops = [max((each for each in group if each is not None), default=None) for group in groups]
    most = max((top for top in tops if top), default=1.0)
    return "".join(" " if top is None else _HEIGHTS[min(7, int(7.99 * top / most))] for top in tops)


def _figures(look: Look, before: Look) -> Iterator[tuple[str, str, Text]]:
    """Yield the name of each line, the figure of its sparkline, and its text."""
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
    oldest = max((frame.get("oldest_wait") or 0.0 for frame in look.frames), default=0.0)
    since = f" (oldest {oldest:.1f} s)" if oldest else ""
    colours = "green" if running else "", "yellow" if waiting else ""
    yield "requests", "running", Text.assemble(
        (f"{running} running", colours[0]), ", ", (f"{waiting} waiting{since}", colours[1]),
        f"; {rate('request_success_total')} ended/s",
    )  # fmt: skip
    refused = f"{rate(rejected)}/s; since its start {', '.join(reasons) or 'none'}"
    yield "refused", "", Text(printable(refused), style="red" if new.get(rejected) else "")
    computed = rate("prompt_tokens_by_source_total local_compute")
    tokens = f"{rate('generation_tokens_total')} generated/s, {computed} of prompts computed/s"
    yield "tokens", "generated", Text(tokens)
    first, gap = mean("time_to_first_token_seconds"), mean("inter_token_latency_seconds")
    yield "latency", "ttft_p99", Text(f"{first} to the first token, {gap} between tokens")


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
        return Text(f"none in {_RECENT:.0f} s", style="dim")
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


def _requests(frames: tuple[Frame, ...], most: int, sort: str, selected: str) -> Iterator[Table]:
    table = _table("request", "tenant", "state", "prompt", "cached", "output", "blocks", "seconds")
    listed = _listed(frames, sort)
    # The selected one stays in sight.
    place = next((place for place, (_, each) in enumerate(listed) if each.request_id == selected), 0)
    for now, each in listed[max(0, place - most // 2) :][:most]:
        numbers = (each.num_prompt_tokens, each.num_cached_tokens, each.num_output_tokens, each.num_blocks)
        cells = (*map(str, numbers), f"{now - each.arrival_time:.1f}")
        style = "reverse" if each.request_id == selected else None
        table.add_row(_name(each.request_id), _name(each.tenant), _state(each), *cells, style=style)
    if listed:
        yield table


def _listed(frames: tuple[Frame, ...], sort: str) -> list[tuple[float, RequestSnapshot]]:
    """Return the requests of all engines in the order of a column, the highest number first, each with the time."""
    both = [frame[part] for part in ("running", "waiting") for frame in frames]
    times = [frame["time"] for _ in range(2) for frame in frames]
    listed = [(now, each) for now, requests in zip(times, both, strict=True) for each in requests]
    if sort == "tenant":
        return sorted(listed, key=lambda pair: pair[1].tenant)
    if sort == "seconds":
        return sorted(listed, key=lambda pair: pair[1].arrival_time - pair[0])
    field = "num_blocks" if sort == "blocks" else f"num_{sort}_tokens"
    return sorted(listed, key=lambda pair: -getattr(pair[1], field)) if sort else listed


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
