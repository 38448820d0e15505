"""Several models that share memory and cores, in virtual time: what the policy never does, and what it costs."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import app.simulate.several
from app.commands.cli import main
from app.config.settings import Settings, SettingsError
from app.serving.model_policy import ModelState
from app.simulate.driver import Outcome
from app.simulate.several import (
    UNLOAD_SECONDS,
    ModelFacts,
    PoolDoor,
    SimulatedModel,
    draw_models,
    read_models,
    simulate_models,
)
from app.workload.datasets import WorkloadRequest
from tests.app.simulate.helpers import TABLE, Instant, asked, constant

MIB = 2**20
STEP = 0.05
NAMES = "abcdefghij"


def known(name: str, mib: int = 100, load: float = 1.0, **own: Any) -> ModelFacts:
    machine = Instant(table=constant(STEP), num_blocks=256)
    return ModelFacts(Settings(model=name, **own), machine, mib * MIB, load)


def simulated(
    requests: Sequence[WorkloadRequest], owners: Sequence[int], models: Sequence[ModelFacts], mib: int, **options: Any
) -> Outcome:
    return simulate_models(requests, owners, models, Settings(memory=mib * MIB), **options)


class CheckedDoor(PoolDoor):
    """The door with its promises checked whenever it plans."""

    def _plan(self) -> None:
        busy = [each for each in self.models if each.in_use]
        super()._plan()
        assert self.policy.used <= self.policy.limit, "more memory than there is"
        assert all(each.state is ModelState.LOADED for each in busy), "a model with requests was unloaded"
        assert all(each.state is ModelState.LOADED for each in self.models if each.pinned)

    def _unloaded(self, model: SimulatedModel) -> None:
        assert not model.in_use
        super()._unloaded(model)


ARRIVALS = st.lists(st.tuples(st.floats(0, 60), st.integers(0, 4), st.integers(1, 60)), min_size=1, max_size=30)


@settings(max_examples=15, deadline=None)
@given(
    arrivals=ARRIVALS,
    needs=st.lists(st.integers(64, 300), min_size=5, max_size=5),
    pins=st.sets(st.integers(0, 4), max_size=2),
    limit=st.integers(300, 900),
    load=st.sampled_from([0.0, 0.4, 3.0]),
    idle=st.sampled_from([0.0, 2.0]),
    patience=st.sampled_from([3.0, 30.0]),
)
def test_memory_is_never_exceeded_no_model_in_use_goes_and_every_request_ends(
    arrivals: list[tuple[float, int, int]],
    needs: list[int],
    pins: set[int],
    limit: int,
    load: float,
    idle: float,
    patience: float,
) -> None:
    models = [
        known(NAMES[n], need, load, pinned=n in pins, idle_unload=idle, max_queue_time=patience)
        for n, need in enumerate(needs)
    ]
    requests = [asked(when, 8, length, name=str(n)) for n, (when, _, length) in enumerate(arrivals)]
    owners = [owner for _, owner, _ in arrivals]
    if sum(needs[n] for n in pins) > limit:
        with pytest.raises(SettingsError, match="pinned"):
            simulated(requests, owners, models, limit)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app.simulate.several, "PoolDoor", CheckedDoor)
        outcome = simulated(requests, owners, models, limit)
    assert len(outcome.requests) == len(requests)
    for record, request, owner in zip(outcome.records, requests, owners, strict=True):
        fits = needs[owner] + sum(needs[n] for n in pins - {owner}) <= limit
        assert record.error in ("", "HTTP 503 model_not_loaded") if fits else record.error == "HTTP 503 model_too_large"
        if not record.error:
            assert record.num_output_tokens == request.num_output_tokens
    assert outcome.figures["most_memory_used"] <= limit * MIB
    each = outcome.figures["models"].values()
    assert sum(model["requests"] for model in each) == len(requests)
    assert sum(model["refused"] for model in each) == sum(bool(record.error) for record in outcome.records)


def zipf(count: int, gap: float, num_models: int = 10) -> tuple[list[WorkloadRequest], list[int]]:
    requests = [asked(n * gap, 8, 4, name=str(n)) for n in range(count)]
    return requests, draw_models(requests, num_models, 1.0, 0)


def test_requests_that_never_meet_load_what_least_recently_used_caching_misses() -> None:
    requests, owners = zipf(300, gap=20.0)
    models = [known(name) for name in NAMES]
    outcome = simulated(requests, owners, models, 300)
    kept: OrderedDict[int, None] = OrderedDict()
    misses = []
    for owner in owners:
        misses.append(owner not in kept)
        kept[owner] = None
        kept.move_to_end(owner)
        if len(kept) > 3:
            kept.popitem(last=False)
    assert outcome.figures["loads"] == sum(misses)
    for record, is_miss in zip(outcome.records, misses, strict=True):
        waited = record.ttft - STEP
        assert waited == pytest.approx(1.0, abs=UNLOAD_SECONDS + 1e-6) if is_miss else waited == pytest.approx(0.0)


def test_of_ten_models_with_room_for_three_all_are_answered() -> None:
    requests, owners = zipf(400, gap=0.7)
    outcome = simulated(requests, owners, [known(name, max_queue_time=60) for name in NAMES], 300)
    figures = outcome.figures
    print({name: figures[name] for name in ("loads", "p50_load_wait_ms", "p99_load_wait_ms", "most_memory_used")})
    assert not any(record.error for record in outcome.records)
    counts = [model["requests"] for model in figures["models"].values()]
    assert counts[0] > 2 * counts[4] > 0, "the first model is asked for most"
    assert figures["loads"] < len(requests), "requests are grouped by model"


def test_engines_that_work_at_once_share_the_cores() -> None:
    models = [known("a", pinned=True), known("b", pinned=True)]
    alone = simulated([asked(0.0, 1, 100)], [0], models, 300)
    both = simulated([asked(0.0, 1, 100), asked(0.0, 1, 100)], [0, 1], models, 300)
    assert both.records[0].e2el == pytest.approx(2 * alone.records[0].e2el, rel=0.02)
    assert both.records[1].e2el == pytest.approx(both.records[0].e2el, rel=0.02)
    assert both.figures["device_utilization"] == pytest.approx(1.0, rel=0.02)


def test_an_unloaded_model_loses_its_prefix_cache() -> None:
    requests = [asked(0.0, 64, 1, name="same"), asked(10.0, 64, 1, name="same"), asked(12.0, 64, 1)]
    requests.append(asked(20.0, 64, 1, name="same"))
    outcome = simulated(requests, [0, 0, 1, 0], [known("a"), known("b")], 100)
    assert [record.num_cached_tokens > 0 for record in outcome.records] == [False, True, False, False]


def test_turns_of_a_conversation_have_one_model_and_skew_0_is_uniform() -> None:
    talks = [asked(0.0, 8, 4, conversation=n // 5) for n in range(500)]
    drawn = draw_models(talks, 10, 1.0, 0)
    assert all(len(set(drawn[n : n + 5])) == 1 for n in range(0, 500, 5))
    counts = [draw_models([asked(0.0, 8, 4)] * 10000, 4, 0.0, 0).count(n) for n in range(4)]
    assert min(counts) > 2300


# --- the command


@pytest.fixture
def info(tmp_path: Path) -> Path:
    """Return the /server_info of a server: 500 MiB of weights and engine, and a KV cache of 100 MiB."""
    path = tmp_path / "info.json"
    told = {"max_num_seqs": 4, "kv_cache_memory": 100 * MIB, "device": "cpu"}
    kv_cache = {"num_blocks": 64, "block_size": 16}
    more = {"memory": 600 * MIB, "load_seconds": 2.5}
    path.write_text(
        json.dumps({"step_cost": msgspec.to_builtins(TABLE), "kv_cache": kv_cache, "settings": told, **more})
    )
    return path


def test_the_facts_of_a_model_come_from_its_table_and_what_its_server_measured(info: Path) -> None:
    tables = {
        "usual": {"model": "org/a"},
        "small": {"model": "org/b", "kv_cache_memory": 50 * MIB, "pinned": True},
        "share": {"model": "org/c", "memory": 900 * MIB},
    }
    usual, small, share = read_models(Settings(models=tables), [info] * 3)
    assert [each.memory // MIB for each in (usual, small, share)] == [500 + 512, 550, 900]
    assert [each.machine.num_blocks for each in (usual, small, share)] == [64 * 512 // 100, 32, 64]
    assert small.settings.pinned
    assert small.settings.max_num_seqs == 4
    assert {each.load_seconds for each in (usual, small, share)} == {2.5}
    assert read_models(Settings(models={"x": {}}), [info], load_seconds=7.0)[0].load_seconds == 7.0


def test_the_report_of_several_models(info: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "models.toml"
    config.write_text('memory = "1500MiB"\n' + "".join(f'[models.{n}]\nmodel = "org/{n}"\n' for n in ("a", "b", "c")))
    flags = f"simulate --config {config} --table {info} --num-prompts 60 --request-rate 1 --output-len 5"
    flags += f" --input-len 20 --model-skew 1 --max-queue-time 600 --json {tmp_path / 'out.json'}"
    assert main(flags.split()) == 0
    printed = capsys.readouterr().out
    assert "load wait p99 ms" in printed
    assert "Wait for the model to load" in printed
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["completed"] == 60
    assert result["most_memory_used"] <= result["memory_limit"] == 1500 * MIB
    assert sum(each["requests"] for each in result["models"].values()) == 60
    assert result["models"]["a"]["requests"] > result["models"]["c"]["requests"]
    assert result["p99_load_wait_ms"] >= 2500
    sweep = flags.replace(" --json", " --sweep memory=1500MiB,4GiB --json")
    assert main(sweep.split()) == 0
    small, large = json.loads((tmp_path / "out.json").read_text())["sweep"]
    assert small["loads"] > large["loads"] == 3
    assert "load wait p50 ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--replicas 2", "--replicas: each of several models has one engine"),
        ("--model-skew -1", "--model-skew: got -1.0; allowed: at least 0"),
        ("--data-parallel-size 2", "data_parallel_size: got 2"),
    ],
)
def test_what_is_refused_with_several_models(
    info: Path, capsys: pytest.CaptureFixture[str], flags: str, words: str
) -> None:
    assert main([*f"simulate --table {info} --model org/a --model org/b --num-prompts 5 {flags}".split()]) == 1
    assert words in capsys.readouterr().err


def test_a_model_of_unknown_memory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.json"
    table.write_bytes(TABLE.to_json())
    assert main([*f"simulate --table {table} --model org/a --model org/b --num-prompts 5".split()]) == 1
    assert "models.org/a" in capsys.readouterr().err
    assert math.isfinite(simulated([asked(0.0, 1, 1)], [0], [known("a")], 200).figures["simulated_seconds"])
