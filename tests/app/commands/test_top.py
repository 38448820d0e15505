"""The page of `headrace top`, of looks that were made by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from app.client import ServerError
from app.commands.top import Look, Past, Screen, Watcher, _counted, _sparkline, page, run
from app.config.settings import Settings, SettingsError
from app.observability.frames import make_frame
from engine.snapshot import (
    BlocksSnapshot,
    EngineSnapshot,
    RequestSnapshot,
    StepOutcome,
    StepSnapshot,
    TenantSnapshot,
    WaitsFor,
)


def request(request_id: str, **fields: Any) -> RequestSnapshot:
    usual: dict[str, Any] = {
        "tenant": "acme",
        "status": "running",
        "priority": 0,
        "arrival_time": 90.0,
        "num_prompt_tokens": 100,
    }
    usual |= {"num_cached_tokens": 32, "num_computed_tokens": 110, "num_output_tokens": 11, "num_blocks": 7}
    return RequestSnapshot(request_id=request_id, **(usual | {"num_preemptions": 0} | fields))


def step(number: int, seconds: float) -> StepSnapshot:
    return StepSnapshot(
        step=number,
        time=99.0,
        seconds=seconds,
        outcome=StepOutcome.DONE,
        num_requests=2,
        num_prefill_tokens=30,
        num_decode_tokens=1,
        prefill_budget=64,
        request_ids=["a", "b"],
        num_scheduled_tokens=[1, 30],
        num_sampled_tokens=[1, 0],
        left=(),
    )


def snapshot(**fields: Any) -> EngineSnapshot:
    usual: dict[str, Any] = {
        "time": 100.0,
        "seconds": 0.0,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "target_inter_token_latency": 0.08,
        "num_steps": 2,
        "num_steps_in_flight": 0,
        "num_running": 2,
        "num_waiting": 1,
        "running": (request("a", num_preemptions=2), request("b", num_computed_tokens=40, num_output_tokens=0)),
        "waiting": (request("c", status="waiting", waits_for=WaitsFor.SLOT, arrival_time=98.5),),
        "tenants": (TenantSnapshot(tenant="acme", num_running=2, num_waiting=1, max_running=0, served=5.0),),
        "blocks": BlocksSnapshot(
            num_owned=10, num_cached=10, num_free=20, by_ref_count={1: 7, 2: 3}, map="", map_stride=1
        ),
        "steps": (step(1, 0.01), step(2, 0.09)),
    }
    return EngineSnapshot(**(usual | fields))


def counted(**values: float) -> defaultdict[str, float]:
    return defaultdict(float, values)


def text_of(
    look: Look, before: Look, *, most_requests: int = 20, width: int = 120, screen: Screen | None = None
) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(page("http://here", look, before, most_requests=most_requests, width=width, screen=screen))
    return capture.get()


def look_of(*frames: Any, time: float = 1.0, trouble: str = "", past: Past | None = None, **values: Any) -> Look:
    return Look(time=time, counted=counted(**values), frames=frames, trouble=trouble, past=past or Past())


def test_a_look_shows_batch_queue_blocks_and_steps():
    shown = text_of(look_of(make_frame(snapshot())), look_of())
    assert "10 owned (3 shared), 10 cached, 20 free" in shown
    assert "50.0 ms each, 90.0 at most, of 80\n" in shown.replace("  ", "")
    assert "2.0 of 4 requests and 30.0 of 64 prefill tokens in a step" in shown
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.split()}
    assert rows["a"][1:] == ["acme", "decode,", "preempted", "2", "100", "32", "11", "7", "10.0"]
    assert rows["b"][1:5] == ["acme", "prefill", "40", "%"]
    assert rows["c"][1:4] == ["acme", "no", "slot"]
    assert rows["c"][-1] == "1.5"
    assert rows["acme"] == ["acme", "2", "1"]


def test_names_give_way_where_there_is_too_little_room():
    long = request("cmpl-" + "0123456789" * 4, tenant="key-948fe603f61dc036")
    shown = text_of(look_of(make_frame(snapshot(running=(long,)))), look_of(), width=70)
    (row,) = (line for line in shown.splitlines() if line.startswith("cmpl-0"))
    assert row.split()[-6:] == ["decode", "100", "32", "11", "7", "10.0"]
    assert "KV blocks" in shown


def test_several_engines_are_shown_one_by_one_and_no_more_requests_than_there_is_room():
    frames = [make_frame(snapshot(), engine=number) for number in range(2)]
    shown = text_of(look_of(*frames), look_of(), most_requests=3)
    assert "KV blocks 0" in shown
    assert "KV blocks 1" in shown
    assert sum("acme" in line for line in shown.splitlines()) == 3 + 1  # and the tenant


def test_rates_are_of_what_came_since_the_look_before_also_of_a_server_that_began_anew():
    before = look_of(generation_tokens_total=100.0, inter_token_latency_seconds_sum=1.0)
    values: dict[str, Any] = {"inter_token_latency_seconds_sum": 1.2, "inter_token_latency_seconds_count": 10.0}
    now = look_of(time=3.0, generation_tokens_total=150.0, **values)
    assert "25.0 generated/s" in text_of(now, before)
    assert "20.0 ms between tokens" in text_of(now, before)
    assert "– ms" not in text_of(now, before)
    assert "0.0 generated/s" in text_of(look_of(time=5.0, generation_tokens_total=1.0), now)
    assert "– generated/s" in text_of(now, now)


@pytest.mark.parametrize("prefix", ["vllm:", "vllm_", "", "a:b_"])
def test_metrics_are_known_by_any_prefix(prefix: str):
    text = f"""\
# TYPE {prefix}num_requests_running gauge
{prefix}num_requests_running{{model_name="a"}} 2.0
# TYPE {prefix}generation_tokens counter
{prefix}generation_tokens_total{{model_name="a"}} 7.0
# TYPE headrace:tenant_num_requests_running gauge
headrace:tenant_num_requests_running{{tenant="a"}} 9.0
"""
    counted = _counted(text)
    assert (counted["num_requests_running"], counted["generation_tokens_total"]) == (2.0, 7.0)


def test_refusals_are_told_by_reason():
    text = """\
# TYPE vllm:admission_rejections counter
vllm:admission_rejections_total{model_name="a",reason="queue_full"} 3.0
vllm:admission_rejections_total{model_name="a",reason="tokens"} 0.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a"} 2.0
vllm:num_requests_running{engine="1",model_name="a"} 3.0
"""
    shown = text_of(Look(time=1.0, counted=_counted(text)), look_of(time=0.0))
    assert "3.0/s; since its start 3 queue_full" in shown
    assert "5 running, 0 waiting" in shown


def test_what_others_wrote_is_shown_as_text_and_nothing_of_it_obeyed():
    frame = make_frame(snapshot(running=(request("[red]x[/red]\x1b[2J", tenant="[/]"),)))
    reason: dict[str, Any] = {"admission_rejections_total \x1b[2J": 1.0}
    shown = text_of(look_of(frame, trouble="it [bold]hurts \x1b[2J", **reason), look_of())
    assert "[red]x[/red]" in shown
    assert "it [bold]hurts" in shown
    assert "\x1b[2J" not in shown


@contextmanager
def serving(**answers: bytes) -> Iterator[str]:
    """A server with these answers to `metrics`, `frames` and `history`, and 404 for the others."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answers.get(self.path.rpartition("/")[2])
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


METRICS = b"vllm:num_requests_running 2.0\n"


@pytest.mark.parametrize("metrics", [b"\xff", b"<html>no</html>"])
def test_metrics_that_are_not_understood_are_said(metrics: bytes):
    with serving(metrics=metrics) as url, pytest.raises(ServerError, match="unknown form"):
        Watcher(url, None, None).look()


def test_a_server_of_another_version_is_named_and_its_figures_are_shown():
    with serving(metrics=METRICS, frames=b'data: {"object": "frame", "engine": "first"}\n\n', history=b"[]") as url:
        look = Watcher(url, None, None).look()
    assert "another version" in look.trouble
    assert "2 running" in text_of(look, look)


@pytest.mark.parametrize(
    "past",
    [
        Past(seconds=1e300, models=[{"name": "m"}]),
        Past(models=[{}]),
        Past(models=[{"name": "m", "context": 5}]),
        Past(series={"m": {"running": ["x", "y"]}}),
    ],
)
def test_facts_of_another_form_leave_the_figures(past: Past):
    shown = text_of(look_of(past=past, num_requests_running=2.0), look_of())
    assert "another version" in shown
    assert "2 running" in shown


def test_a_server_without_frames_is_another_server_and_no_trouble():
    with serving(metrics=METRICS) as url:
        look = Watcher(url, None, None).look()
    assert (look.trouble, look.frames, look.past) == ("", (), Past())
    assert "2 running" in text_of(look, look)


def test_a_sparkline_is_as_high_as_the_highest_of_four_and_empty_without_values():
    assert _sparkline([1.0] * 4 + [8.0, 0.0, 2.0, 1.0] + [None] * 4 + [0.0] * 4) == "▁█ ▁"
    assert _sparkline([5.0]) == "█"
    assert _sparkline([0.0] * 180) == "▁" * 45
    assert _sparkline([]) == ""


def test_the_past_and_what_is_served_are_shown_where_the_server_has_them():
    columns = {name: [0.0] * 40 + [9.0] for name in ("running", "generated", "ttft_p99")}
    model = {"name": "tiny", "device": "cpu", "threads": 2, "context": 8192, "slots": 4}
    past = Past(version="1.2.3", seconds=7265.0, models=[model], series={"tiny": columns})
    shown = text_of(look_of(make_frame(snapshot(oldest_wait=25.0)), past=past, num_requests_waiting=1.0), look_of())
    assert "tiny · Headrace 1.2.3 · up 2:01:05 · cpu · 2 threads · context 8,192 · 4 slots" in shown
    assert "▁▁▁▁▁▁▁▁▁▁  0 running, 1 waiting (oldest 25.0 s)" in shown


def test_the_past_of_a_server_that_gives_none_is_what_was_seen_here():
    watcher = Watcher("http://here", None, None)
    first, sums = "time_to_first_token_seconds_count", "time_to_first_token_seconds_sum"
    past = Past()
    for second in range(61):  # a look a second; the server starts again after 40 of them
        tokens = 10.0 * (second if second <= 40 else second - 40)
        figures = {"num_requests_running": float(second >= 30), "generation_tokens_total": tokens}
        past = watcher._past(float(second), counted(**figures, **{first: second // 20, sums: (second // 20) * 0.5}))
    series = past.series[""]
    assert series["generated"] == [10.0] * 8 + [0.0] + [10.0] * 3 + [None]
    assert series["running"] == [0.0] * 5 + [1.0] * 7 + [None]
    assert series["ttft_p99"] == [0.5 if slot in (3, 7, 11) else None for slot in range(12)] + [None]
    look = look_of(past=past, num_requests_running=1.0)
    assert "▁██  1 running" in text_of(look, look)
    for second in range(61, 2000):
        past = watcher._past(float(second), counted())
    assert len(past.series[""]["running"]) == 181


def rows_of(look: Look, screen: Screen) -> list[str]:
    return [line.split()[0] for line in text_of(look, look, screen=screen).splitlines() if " acme " in line]


def test_arrows_select_s_sorts_and_an_abort_has_to_be_confirmed():
    aborted: list[str] = []

    def abort(request_id: str) -> str:
        aborted.append(request_id)
        return f"{request_id}: aborted"

    watcher: Any = SimpleNamespace(abort=abort)
    screen = Screen(watcher)
    running = (request("old", num_output_tokens=1), request("long", num_output_tokens=99, arrival_time=95.0))
    look = look_of(make_frame(snapshot(running=running)))

    assert screen.press("a", look)  # without a selection
    assert screen.words == ""
    assert screen.press("\x1b[b\x1b[b\x1b[a\x1b[b", look)
    assert screen.selected == "long"
    assert screen.press("a", look)
    assert "Abort long?" in text_of(look, look, screen=screen)
    assert screen.press("n", look)
    assert (aborted, screen.words) == ([], "long: not aborted")
    assert screen.press("ay", look)
    assert (aborted, screen.words) == (["long"], "long: aborted")
    assert screen.press("\x1b[b" * 9 + "\x1b[a" * 9, look)
    assert screen.selected == "old"

    assert rows_of(look, screen) == ["old", "long", "c"]
    while screen.sort != "output":
        assert screen.press("s", look)
    assert rows_of(look, screen) == ["long", "c", "old"]
    assert screen.press("ss", look)
    assert screen.sort == "seconds"
    assert rows_of(look, screen) == ["old", "long", "c"]
    assert not screen.press("q", look)


def test_a_selected_request_stays_in_sight_of_a_long_list():
    many = tuple(request(f"r{number}") for number in range(100))
    look = look_of(make_frame(snapshot(running=many)))
    screen = Screen(SimpleNamespace())  # type: ignore[arg-type]
    screen.selected = "r70"
    shown = text_of(look, look, most_requests=10, screen=screen)
    assert "r70 " in shown
    assert "r9 " not in shown


@pytest.mark.parametrize("interval", [float("nan"), float("inf"), 0.0, -1.0])
def test_an_interval_that_cannot_be_is_refused(interval: float):
    with pytest.raises(SettingsError, match="--interval: got"):
        run(Settings(), url="http://127.0.0.1:9", api_key=None, interval=interval, once=True)
