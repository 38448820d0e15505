"""A simulation does what the engine does: the same steps, hits, preemptions and order, and always the same."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.config.settings import Settings
from app.simulate.driver import Outcome, run_whole, simulate
from app.simulate.loads import WorkloadLoad
from app.simulate.machine import Machine
from app.workload.datasets import Piece, WorkloadRequest, read_trace
from engine.core.core import EngineCore
from engine.costs.table import Spread, StepCostTable, StepLoad
from engine.messages import EngineCoreRequest, EventKind, ModelFacts
from engine.simulation.counting import CountingExecutor, VirtualClock
from engine.simulation.engines import Engines
from engine.simulation.simulation import Simulation
from tests.app.simulate.helpers import TABLE, Instant, asked, constant, simulated, spread_table
from tests.engine.checked_executor import CheckedExecutor
from tests.engine.simulated_executor import SimulatedExecutor

BLOCKS = 40  # of 16 tokens: fewer than eight requests of 100 and more come to have


def crowd(number: int = 24, gap: float = 0.02) -> list[WorkloadRequest]:
    """Of three system prompts, some of several turns, more than the blocks hold."""
    requests = []
    for index in range(number):
        pieces = (Piece(f"system {index % 3}", 48), Piece(f"question {index}", 5 + 7 * index % 60))
        talk = index if index % 4 == 0 else None
        requests.append(WorkloadRequest(pieces, 20 + 13 * index % 70, arrival=gap * index, conversation=talk))
        if talk is not None:
            requests.append(WorkloadRequest((Piece(f"more {index}", 20),), 30, None, talk, think_time=0.1))
    return requests


def told(outcome: Outcome) -> list[Any]:
    return [
        (each.request_id, each.start_time, each.scheduled_time, each.token_times, each.num_cached_tokens,
         each.num_preemptions, each.end_time)
        for each in outcome.requests
    ]  # fmt: skip


@pytest.mark.parametrize("settings", [{}, {"pipeline_depth": 2}, {"data_parallel_size": 3, "engine": "process"}])
def test_the_same_twice(settings: dict[str, Any]) -> None:
    machine = Machine(table=TABLE, num_blocks=BLOCKS)
    first, second = (simulated(crowd(), machine, max_num_seqs=8, **settings) for _ in range(2))
    assert told(first) == told(second)
    assert sum(each.num_preemptions for each in first.requests) > 0 or settings.get("data_parallel_size")
    assert first.figures["prefix_cache_hits"] > 0
    assert not [record.error for record in first.records if record.error]


@pytest.mark.parametrize("gap", [0.0, 0.02, 0.09, 0.3])
@pytest.mark.parametrize(
    ("num_blocks", "table"), [(BLOCKS, TABLE), (400, TABLE), (BLOCKS, spread_table())], ids=["few", "many", "spread"]
)
def test_steps_that_are_made_as_one_give_the_same(gap: float, num_blocks: int, table: StepCostTable) -> None:
    machine = Machine(table=table, num_blocks=num_blocks)
    watched = simulate(crowd(gap=gap), machine, Settings(max_num_seqs=8), watch=lambda simulation: None)
    leaping = simulated(crowd(gap=gap), machine, max_num_seqs=8)
    assert told(watched) == told(leaping)
    for name in ("num_steps", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits"):
        assert watched.figures[name] == leaping.figures[name]
    assert watched.figures["slot_utilization"] == pytest.approx(leaping.figures["slot_utilization"])


def test_only_the_seed_changes_what_is_drawn_from_a_spread() -> None:
    machine = Machine(table=spread_table())
    first, again, other = (told(simulate(crowd(), machine, Settings(), seed=seed)) for seed in (0, None, 1))
    assert first == again != other
    assert told(simulated(crowd(), Machine(table=spread_table(1e-9)))) != first


def test_the_gaps_of_an_engine_with_noisy_steps_are_foretold() -> None:
    """An engine learns its costs from steps with a tail, and serves a load; the simulator has the table of before."""
    draw = random.Random(3)
    table = StepCostTable.unknown(8, 512)

    def seconds(load: StepLoad) -> float:
        return (
            TABLE.cost(load) * draw.lognormvariate(0, 0.05) * (draw.uniform(1.5, 4.0) if draw.random() < 0.03 else 1.0)
        )

    def make_core(clock: VirtualClock) -> tuple[EngineCore, CountingExecutor]:
        executor = machine.executor(clock, seconds)
        return EngineCore(machine.config(settings), executor, costs=table, clock=clock), executor

    machine, settings = Machine(table=table), Settings(max_num_seqs=8)
    lengths = random.Random(4)
    loads = [
        [asked(0.0, lengths.randint(32, 160), lengths.randint(20, 60), f"{run} {number}") for number in range(250)]
        for run in range(2)
    ]
    for requests in loads:
        before = StepCostTable.from_json(table.to_json())
        load = WorkloadLoad(requests, max_concurrency=8, settings=settings)
        engines = Engines([make_core])
        simulation = Simulation(engines, load, inbound=machine.inbound, outbound=machine.outbound)
        measured = run_whole(simulation, load, 8, None).result()
    foretold = simulate(loads[1], Machine(table=before), settings, max_concurrency=8).result()
    for figure in ("median_itl_ms", "p99_itl_ms", "median_ttft_ms", "output_throughput"):
        assert foretold[figure] == pytest.approx(measured[figure], rel=0.25), figure
    bare = StepCostTable.from_json(before.to_json())
    for curve in (bare.decode, bare.prefill, bare.mixed):
        curve.spread = [Spread() for _ in curve.sizes]
    without = simulate(loads[1], Machine(table=bare), settings, max_concurrency=8).result()
    assert without["p99_itl_ms"] < foretold["p99_itl_ms"], "without a spread there is no tail"


class Offline(WorkloadLoad):
    """What a workload asks of an engine that is given everything at once."""

    def requests(self) -> list[EngineCoreRequest]:
        return [self.take() for _ in self.records]


def test_hits_preemptions_and_order_are_those_of_an_engine_in_real_time() -> None:
    """The engine's loop by hand, on the machine's clock, over the executor that checks every plan."""
    requests = [replace(each, arrival=0.0) for each in crowd(16) if each.conversation is None]
    machine = Instant(table=TABLE, num_blocks=BLOCKS)
    settings = Settings(max_num_seqs=8, target_inter_token_latency=60.0)
    outcome = simulate(requests, machine, settings)
    executor = CheckedExecutor(
        BLOCKS, 16, 2**20, max_num_seqs=8, max_num_batched_tokens=512, windows=(None,), before_step=None
    )
    core = EngineCore(machine.config(settings), executor, costs=TABLE, learns_costs=False)
    for request in Offline(requests, settings=settings).requests():
        core.add(request)
    preempted: dict[str, int] = {}
    cached, ends = {}, []
    while core.has_work:
        for output in core.step().outputs:
            for event in output.events or ():
                if event.kind is EventKind.PREEMPTED:
                    preempted[output.request_id] = preempted.get(output.request_id, 0) + 1
            if output.finish_reason is not None:
                cached[output.request_id] = output.num_cached_tokens
                ends.append(output.request_id)
    simulated_requests = {each.request_id: each for each in outcome.requests}
    assert preempted
    assert preempted == {
        name: each.num_preemptions for name, each in simulated_requests.items() if each.num_preemptions
    }
    assert cached == {name: each.num_cached_tokens for name, each in simulated_requests.items()}
    assert ends == [each.request_id for each in outcome.requests]


def test_a_recorded_run_replayed_is_admitted_in_the_same_order(tmp_path: Path) -> None:
    """Recorded in real time: the engine's loop, with an executor whose steps take theirs."""
    draw = random.Random(4)
    arrivals = sorted(draw.uniform(0.0, 0.3) for _ in range(14))
    recorded = [asked(time, draw.randint(5, 60), draw.randint(2, 12), f"r{time}") for time in arrivals]
    machine, settings = Instant(table=constant(0.01), num_blocks=100), Settings(max_num_seqs=2)
    executor = SimulatedExecutor(100, 16, 2**20, cost=lambda plan: 0.01 if plan.request_ids else 0.0)
    core = EngineCore(machine.config(settings), executor, costs=machine.table, learns_costs=False)
    requests = dict(zip(arrivals, Offline(recorded, settings=settings).requests(), strict=True))
    began, started, sent = time.monotonic(), [], {}
    while requests or core.has_work:
        now = time.monotonic() - began
        for arrival in [arrival for arrival in requests if arrival <= now]:
            sent[requests[arrival].request_id] = time.monotonic()
            core.add(requests.pop(arrival))
        if core.has_work:
            for output in core.step().outputs:
                started += [output.request_id for event in output.events or () if event.kind is EventKind.SCHEDULED]
    result = {
        "start_times": [sent[str(number)] for number in range(len(recorded))],
        "input_lens": [request.num_new_tokens for request in recorded],
        "output_lens": [request.num_output_tokens for request in recorded],
    }
    (tmp_path / "result.json").write_text(json.dumps(result))
    replayed = simulate(read_trace(tmp_path / "result.json"), machine, settings)
    replayed.requests.sort(key=lambda request: (request.scheduled_time, int(request.request_id)))
    assert [request.request_id for request in replayed.requests] == started


def test_several_engines_share_as_the_router_says() -> None:
    requests = [
        WorkloadRequest((Piece(f"system {index % 2}", 640), Piece(f"{index}", 10)), 50, arrival=0.5 * index)
        for index in range(16)
    ]
    outcome = simulated(requests, data_parallel_size=2, engine="process")
    hits = [record.num_cached_tokens for record in outcome.records]
    assert hits == [0, 0] + [640] * 14, "each prompt's engine is the one that knows it"
    alone = simulated(requests[:1])
    assert outcome.records[0].token_times == alone.records[0].token_times


def test_the_door_refuses_as_the_servers_does() -> None:
    outcome = simulated([asked(0.0, 100, 50, f"r{number}") for number in range(20)], max_queued_requests=8)
    refused = [record for record in outcome.records if record.refused]
    assert len(refused) == 12
    assert refused[0].error == "HTTP 429 queue_full"
    assert outcome.result()["refused"] == 12


def test_a_deadline_ends_who_waits_too_long() -> None:
    outcome = simulated([asked(0.0, 10, 400, f"r{number}") for number in range(4)], max_num_seqs=1, default_timeout=7.0)
    assert [record.error for record in outcome.records].count("timeout") == 2
    assert all(record.end_time <= 7.1 for record in outcome.records)
    assert not any(record.refused for record in outcome.records)


def test_only_so_many_are_under_way() -> None:
    requests = [asked(0.0, 10, 20, f"r{number}") for number in range(10)]
    outcome = simulate(requests, Machine(table=TABLE), Settings(), max_concurrency=3)
    assert outcome.result()["max_concurrent_requests"] == 3
    assert [record.start_time for record in outcome.records] == sorted(record.start_time for record in outcome.records)


def test_a_conversation_finds_all_that_was_said_unless_answers_are_computed_otherwise() -> None:
    talk = [
        asked(0.0, 100, 60, "first", conversation=1),
        asked(None, 50, 60, "second", conversation=1, think_time=1.0),
        asked(None, 50, 60, "third", conversation=1),
    ]
    machine = Machine(table=TABLE)
    cached = [record.num_cached_tokens for record in simulated(talk, machine).records]
    assert cached == [0, 159 // 16 * 16, 269 // 16 * 16]
    cached = [
        r.num_cached_tokens
        for r in simulated(talk, replace(machine, facts=ModelFacts(prompt_form_differs=True))).records
    ]
    assert cached == [0, 100 // 16 * 16, 210 // 16 * 16]


def test_a_turn_whose_question_was_refused_is_not_sent() -> None:
    talk = [asked(0.0, 40_000, 10, "long", conversation=1), asked(None, 5, 5, "next", conversation=1)]
    outcome = simulated(talk)
    assert "1 to" in outcome.records[0].error
    assert outcome.records[1].error == "not sent: the previous turn failed"
