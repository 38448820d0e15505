"""What it is worth to know what is cached: prompts of many shared beginnings over eight engines, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from app.commands.cli import main
from app.config.settings import Settings
from app.simulate.driver import Outcome, simulate
from app.simulate.machine import Machine
from app.workload.datasets import Piece, WorkloadRequest
from engine.costs.table import Curve, StepCostTable
from engine.routing.router import Route, Router
from engine.simulation.simulation import Outage

REPLICAS, PREFIXES = 8, 150
# A tenth of llm-d's lengths (6,000 tokens shared, 1,200 of one's own), at ten times the cost of a token.
PREFIX, QUESTION, ANSWER, BLOCK = 600, 120, 50, 8
DEMAND = 0.73  # of the KV caches of all engines, to hold every prefix once
TOKEN = 1e-3  # seconds of prefill
TABLE = StepCostTable(
    decode=Curve([1, 64], [0.02, 0.04]),
    prefill=Curve([1, 1024], [0.02, 1024 * TOKEN]),
    mixed=Curve([1, 1024], [0.0, 1024 * TOKEN]),
)
MACHINE = Machine(
    table=TABLE, num_blocks=round(PREFIXES * PREFIX / DEMAND / REPLICAS / BLOCK), block_size=BLOCK, max_model_len=1024
)


def run(
    route: Route, rate: float, *, count: int = 600, popular: float = 0.0, outages: Sequence[Outage] = ()
) -> Outcome:
    """The second half of the requests, to caches that are warm. One prefix may be that popular."""
    draw, now, requests = Random(1), 0.0, []
    first = list(range(PREFIXES))
    draw.shuffle(first)
    for number in range(count):
        now += draw.expovariate(rate)
        prefix = first[number] if number < PREFIXES else 0 if draw.random() < popular else draw.randrange(PREFIXES)
        pieces = (Piece(f"prefix {prefix}", PREFIX), Piece(f"question {number}", QUESTION))
        requests.append(WorkloadRequest(pieces, ANSWER, arrival=now))
    settings = Settings(
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        max_queue_time=0,
        max_queued_requests=10_000,
        max_queued_tokens=10**8,
    )
    outcome = simulate(requests, MACHINE, settings, replicas=REPLICAS, route=route, outages=outages)
    assert outcome.result()["refused"] == 0, "nobody is refused to look fast"
    return replace(outcome, records=outcome.records[count // 2 :])


def figures_of(route: Route, rate: float, **options: Any) -> dict[str, Any]:
    return run(route, rate, **options).result()


@pytest.mark.slow
def test_known_prefixes_double_the_throughput() -> None:
    """Under a load that is too much for either route. Short prompts overtake long ones, so a request whose prefix is
    cached runs while it still is: that helps both routes, and leaves them 3.2 and 2.9 times apart."""
    by_prefix, blind = (figures_of(route, 30.0, count=1200) for route in ("prefix", "round-robin"))
    assert by_prefix["request_throughput"] >= 2.5 * blind["request_throughput"]
    assert by_prefix["total_cached_tokens"] > 2.5 * blind["total_cached_tokens"]


@pytest.mark.slow
def test_known_prefixes_keep_first_tokens_twenty_times_as_quick() -> None:
    """At a rate that is too much where nobody knows."""
    by_prefix, blind = (figures_of(route, 16.0, count=1200) for route in ("prefix", "round-robin"))
    assert by_prefix["p90_ttft_ms"] <= blind["p90_ttft_ms"] / 20


@pytest.mark.slow
def test_a_prefix_that_is_too_popular_for_one_engine_gets_copies() -> None:
    figures = figures_of("prefix", 16.0, count=1200, popular=0.5)
    assert figures["total_cached_tokens"] / figures["total_input_tokens"] > 0.6
    assert figures["uncached_tokens_max_by_mean"] < REPLICAS / 2, "no engine has them all"
    assert figures["p90_ttft_ms"] < 3000


@pytest.mark.slow
def test_who_is_lost_with_a_part_of_the_fleet() -> None:
    """Those that had begun. All others are answered by who is left, and by those that come back."""
    outage = Outage(30.0, 35.0, range(3))
    outcome = run("prefix", 14.0, outages=[outage])
    whole, figures = figures_of("prefix", 14.0), outcome.result()
    lost = [record for record in outcome.records if record.error]
    assert lost
    assert figures["num_placed_again"] > 0
    for record in lost:
        assert record.start_time + record.ttft <= outage.start <= record.end_time < outage.start + 0.1
    assert figures["completed"] == whole["completed"] - len(lost)
    assert figures["p99_ttft_ms"] > 1.5 * whole["p99_ttft_ms"], "what was cached there is computed again"


@pytest.mark.slow
def test_outages_may_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes back is there once."""
    choose = Router.choose

    def choose_of_each_once(self: Router, ids: Any, prompt: Any, alive: Any, **more: Any) -> int:
        assert len(alive) == len(set(alive))
        return choose(self, ids, prompt, alive, **more)

    monkeypatch.setattr(Router, "choose", choose_of_each_once)
    both = [Outage(20.0, 22.0, range(3)), Outage(21.0, 23.0, range(2))]
    figures = run("prefix", 14.0, count=400, outages=both).result()
    assert 0 < figures["failed"] < 100
    assert figures["completed"] + figures["failed"] == 200


def test_the_flags_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.json"
    table.write_bytes(TABLE.to_json())
    flags = f"simulate --table {table} --num-prompts 20 --output-len 9 --input-len 200 --replicas 3".split()
    assert main([*flags, "--route", "round-robin"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Routed by round-robin: 0 % of the prompts from prefix caches" in printed
    assert "0 refused, 0 placed again" in printed
    assert main([*flags, "--outage", "0:1:2"]) == 0
    assert main([*flags, "--outage", "0:1:3"]) == 1
    assert "--outage: got '0:1:3'; allowed: START:SECONDS:N" in capsys.readouterr().err
    assert main([*flags, "--sweep", "route=prefix,random"]) == 0
    assert "refused" in capsys.readouterr().out
    assert main([*flags, "--replicas", "0"]) == 1
    assert "--replicas: got 0; allowed: 1 to 1024" in capsys.readouterr().err
    assert main([*flags, "--sweep", "route=best"]) == 1
    assert "--route: got best; allowed: prefix, load, round-robin, random" in capsys.readouterr().err


@pytest.mark.slow
def test_a_simulation_is_the_same_each_time() -> None:
    assert figures_of("prefix", 16.0, count=200)["p90_ttft_ms"] == figures_of("prefix", 16.0, count=200)["p90_ttft_ms"]
