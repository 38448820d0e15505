"""Requests with several choices: they share their prompt as in the engine, and count as the server counts them."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as changed

from app.commands.cli import main
from app.config.settings import Settings
from app.simulate.driver import simulate
from app.simulate.machine import Machine
from app.workload.datasets import WorkloadRequest, read_trace
from engine.core.core import EngineCore
from engine.simulation.counting import VirtualClock
from engine.simulation.simulation import Outage
from tests.app.simulate.helpers import TABLE, Instant, asked, simulated, spread_table
from tests.app.simulate.test_exactness import Offline, crowd


def several(n: int, number: int = 12, gap: float = 0.05) -> list[WorkloadRequest]:
    return [replace(asked(gap * index, 40 + 9 * index, 5 + 7 * index, f"r{index}"), n=n) for index in range(number)]


def test_choices_share_their_prompt_and_answer_for_themselves() -> None:
    outcome = simulated([replace(asked(0.0, 100, 24), n=4)])
    (record,) = outcome.records
    assert record.num_output_tokens == len(record.token_times) == len(record.token_choices) == 4 * 24
    assert outcome.figures["prefix_cache_hits"] == 3 * 96, "one computes the prompt, three find its six blocks"
    assert record.num_prompt_tokens == 100
    assert record.num_cached_tokens == 0
    times: dict[int, list[float]] = defaultdict(list)
    for choice, time in zip(record.token_choices, record.token_times, strict=True):
        times[choice].append(time)
    assert [len(times[choice]) for choice in range(4)] == [24] * 4
    assert len(record.itls) == 4 * 23
    assert min(record.itls) > 0, "gaps are those of each choice"
    assert record.tpot == pytest.approx(sum(later - earlier for earlier, later in pairwise(times[3])) / 23, rel=0.1)
    alone = simulated([asked(0.0, 100, 24)]).records[0]
    assert alone.token_times[0] == record.token_times[0]
    assert alone.token_choices == []


def test_hits_and_steps_are_those_of_an_engine_with_the_same_choices() -> None:
    requests = several(3, gap=0.0)
    machine, settings = Instant(table=TABLE, num_blocks=30), Settings(max_num_seqs=8, target_inter_token_latency=60.0)
    outcome = simulate(requests, machine, settings)
    clock = VirtualClock()
    executor = machine.executor(clock, TABLE.cost)
    core = EngineCore(machine.config(settings), executor, costs=TABLE, learns_costs=False, clock=clock)
    for request in Offline(requests, settings=settings).requests():
        assert request.sampling.n == 3
        seed, most = request.sampling.seed or 0, request.sampling.max_tokens or 0
        for number in range(3):
            sampling = changed(request.sampling, n=1, seed=seed + number * most)
            core.add(changed(request, request_id=f"{request.request_id}/{number}", sampling=sampling))
    hits = preempted = 0
    while core.has_work:
        stats = core.step().stats
        hits, preempted = hits + stats.prefix_cache_hits, preempted + stats.num_preemptions
    assert hits == outcome.figures["prefix_cache_hits"] > 0
    assert preempted == outcome.figures["num_preemptions"] > 0
    assert core.num_steps == outcome.figures["num_steps"]


@pytest.mark.parametrize("table", [TABLE, spread_table()], ids=["exact", "spread"])
def test_steps_that_are_made_as_one_give_the_same(table: Any) -> None:
    machine = Machine(table=table, num_blocks=400)
    requests = [replace(each, n=1 + number % 3) for number, each in enumerate(crowd())]
    watched = simulate(requests, machine, Settings(max_num_seqs=8), watch=lambda simulation: None)
    leaping = simulate(requests, machine, Settings(max_num_seqs=8))
    assert [each.token_times for each in watched.records] == [each.token_times for each in leaping.records]
    assert [each.token_choices for each in watched.records] == [each.token_choices for each in leaping.records]
    assert watched.figures["num_steps"] == leaping.figures["num_steps"]


def test_choices_take_as_many_places_of_the_queue() -> None:
    outcome = simulated(several(4, 8, 0.0), max_num_seqs=4, max_queued_requests=16, max_queue_time=0)
    assert [record.error for record in outcome.records] == [""] * 4 + ["HTTP 429 queue_full"] * 4
    outcome = simulated(several(1, 8, 0.0), max_num_seqs=4, max_queued_requests=16, max_queue_time=0)
    assert not any(record.error for record in outcome.records)


def test_a_request_is_lost_with_any_of_its_choices_and_only_once() -> None:
    settings = Settings(
        max_num_seqs=2, max_queued_requests=1000, max_queue_time=0, data_parallel_size=2, engine="process"
    )
    outcome = simulate(several(3, 8, 0.0), Machine(table=TABLE), settings, outages=[Outage(0.2, 0.5, range(1))])
    errors = [record.error for record in outcome.records]
    assert 0 < errors.count("its engine was lost") < 8
    assert outcome.figures["num_placed_again"] > 0
    for record in outcome.records:
        assert record.error or record.num_output_tokens == len(record.token_times) > 0
    assert len(outcome.requests) == 8, "each ends once"


def test_a_deadline_ends_a_request_once() -> None:
    outcome = simulated(several(4, 4, 0.0), max_num_seqs=2, default_timeout=0.3, max_queue_time=0)
    assert len(outcome.requests) == 4
    assert any(record.error for record in outcome.records)


def test_the_flag_the_trace_and_the_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, out, trace = tmp_path / "table.json", tmp_path / "out.json", tmp_path / "trace.jsonl"
    table.write_bytes(TABLE.to_json())
    flags = f"simulate --table {table} --num-prompts 6 --input-len 40 --output-len 10 --json {out}".split()
    assert main([*flags, "--n", "3"]) == 0
    result = json.loads(out.read_text())
    assert (result["total_output_tokens"], result["total_input_tokens"], result["n"]) == (180, 240, 3)
    replayed = read_trace(out)
    assert {(each.n, each.num_output_tokens) for each in replayed} == {(3, 10)}
    trace.write_text('{"time": 0, "input_tokens": 40, "output_tokens": 10, "n": 2}\n')
    assert main(f"simulate --table {table} --trace {trace} --json {out}".split()) == 0
    assert json.loads(out.read_text())["total_output_tokens"] == 20
    trace.write_text('{"time": 0, "input_tokens": 40, "output_tokens": 10, "n": 0}\n')
    assert main(f"simulate --table {table} --trace {trace}".split()) == 1
    assert "n: got 0; allowed: a whole number from 1 to 128" in capsys.readouterr().err
    assert main([*flags, "--n", "129"]) == 1
    assert "--n: got 129; allowed: 1 to 128" in capsys.readouterr().err
    assert main([*flags, "--sweep", "n=1,2"]) == 0
    assert [run["total_output_tokens"] for run in json.loads(out.read_text())["sweep"]] == [60, 120]
