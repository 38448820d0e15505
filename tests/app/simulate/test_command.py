"""`headrace simulate`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.commands.cli import main
from app.config.engine import describe
from app.config.settings import Settings, SettingsError
from app.serving.step_cost_file import FOLDER, StepCostFile
from app.simulate.command import find_rate, parse_slo
from app.simulate.machine import Machine, read_machine
from tests.app.simulate.helpers import TABLE, spread_table


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.json"
    path.write_bytes(TABLE.to_json())
    return path


def test_the_report_of_a_bench_and_its_files(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / name for name in ("result.json", "page.html", "frames.jsonl")]
    flags = f"--table {table} --num-prompts 30 --request-rate 5 --output-len 20 --max-num-seqs 4 --goodput ttft:300"
    flags += f" --json {files[0]} --html {files[1]} --record {files[2]}"
    assert main(["simulate", *flags.split()]) == 0
    printed = capsys.readouterr().out
    assert "Time to first token" in printed
    assert "simulated seconds" in printed
    result = json.loads(files[0].read_text())
    assert result["completed"] == 30
    assert result["request_goodput"] > 0
    assert len(result["ttfts"]) == len(result["start_times"]) == 30
    assert files[1].read_text().startswith("<!doctype html>")
    frames = [json.loads(line) for line in files[2].read_text().splitlines()]
    steps = [step["step"] for frame in frames for step in frame["steps"]]
    assert steps == list(range(1, len(steps) + 1))
    assert max(len(step["rows"]) for frame in frames for step in frame["steps"]) == 4
    # What is written can be read as a trace, and comes to the same.
    again = tmp_path / "again.json"
    more = f"--table {table} --trace {files[0]} --max-num-seqs 4 --json {again}"
    assert main(["simulate", *more.split()]) == 0
    replayed = json.loads(again.read_text())
    assert replayed["output_throughput"] == pytest.approx(result["output_throughput"], rel=0.02)
    assert replayed["p50_ttft_ms"] == pytest.approx(result["p50_ttft_ms"], rel=1e-6)


def test_what_a_server_tells_of_itself_is_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = {
        "step_cost": msgspec.to_builtins(TABLE),
        "kv_cache": {"num_blocks": 64, "block_size": 16},
        "max_model_len": 1024,
        "settings": {"max_num_seqs": 3, "kv_cache_memory": None, "device": "cpu"},
    }
    path = tmp_path / "info.json"
    path.write_text(json.dumps(info))
    flags = f"simulate --table {path} --num-prompts 20 --input-len 50 --output-len 20 --json {tmp_path / 'out.json'}"
    assert main(flags.split()) == 0
    utilization = json.loads((tmp_path / "out.json").read_text())["slot_utilization"]
    assert main([*flags.split(), "--max-num-seqs", "6"]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["slot_utilization"] < utilization
    capsys.readouterr()
    prefixes = f"simulate --table {path} --num-prompts 20 --output-len 2 --dataset-name prefix_repetition"
    assert main([*prefixes.split(), "--prefix-repetition-num-prefixes", "1"]) == 0
    assert "another --seed" not in capsys.readouterr().out  # no run before has filled the prefix cache
    path.write_text(json.dumps({"machine": {}, "rows": [], "engines": {"Llama-3.1-8B": info, "Qwen3-0.6B": info}}))
    assert main([*flags.split(), "--model", "Llama-3.1-8B"]) == 0
    capsys.readouterr()
    assert main(flags.split()) == 1
    message = "engines: no engine of --model smollm2-135m-instruct was measured; allowed: Llama-3.1-8B, Qw"
    assert message in capsys.readouterr().err


def test_what_the_last_engine_measured_is_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"simulate --cache-dir {tmp_path} --num-prompts 20 --output-len 20 --json {tmp_path / 'out.json'}".split()
    assert main(flags) == 1
    assert "--table: there are no measured step costs of smollm2-135m-instruct" in capsys.readouterr().err
    settings = Settings(max_num_seqs=3, executor="mp")
    description = describe(Machine(table=TABLE, num_blocks=77, max_model_len=1234), settings)
    StepCostFile(tmp_path / FOLDER / "a.json", description).write(TABLE)
    assert main(flags) == 0
    assert "a.json\nStep costs of smollm2-135m-instruct: of unknown age: decodes of 1 to 64" in capsys.readouterr().out
    told, known = read_machine(tmp_path / FOLDER / "a.json", Settings())
    assert told == Machine(table=TABLE, num_blocks=77, max_model_len=1234)
    assert (known.max_num_seqs, known.engine) == (3, "process")


def test_refusals_are_counted_by_the_same_words_as_a_servers(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(f"simulate --table {table} --num-prompts 40 --max-queued-requests 4 --json {out}".split()) == 0
    result = json.loads(out.read_text())
    assert result["failures"] == {"HTTP 429 queue_full": result["refused"]}
    assert result["refused"] > 0


@pytest.mark.parametrize("flag", ["--json", "--html", "--record"])
def test_what_cannot_be_written_is_known_before(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    with pytest.raises(SystemExit) as left:
        main(f"simulate --table {table} {flag} {tmp_path / 'none' / 'file'}".split())
    assert left.value.code == 2
    assert (
        f"argument {flag}: got {tmp_path}/none/file; allowed: a file in a folder that exists" in capsys.readouterr().err
    )


def test_a_sweep_is_a_table(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"--table {table} --num-prompts 12 --sweep max_num_seqs=1,4 --sweep output-len=8,16".split()
    assert main(["simulate", *flags]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert [line[:2] for line in lines[2:6]] == [["1", "8"], ["1", "16"], ["4", "8"], ["4", "16"]]


def test_a_sweep_is_written(table: Path, tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    assert main(f"simulate --table {table} --num-prompts 12 --sweep max_num_seqs=1,4 --json {file}".split()) == 0
    runs = json.loads(file.read_text())["sweep"]
    assert [run["changes"] for run in runs] == [{"max_num_seqs": "1"}, {"max_num_seqs": "4"}]
    assert all(run["completed"] == run["num_prompts"] == 12 for run in runs)


def test_a_trace_is_cut_and_sped_up(table: Path, tmp_path: Path) -> None:
    trace, file = tmp_path / "trace.jsonl", tmp_path / "result.json"
    lines = [{"time": 10.0 * number, "input_tokens": 40, "output_tokens": 4} for number in range(20)]
    trace.write_text("\n".join(map(json.dumps, lines)))

    def result(flags: str) -> dict[str, Any]:
        assert main(f"simulate --table {table} --trace {trace} --json {file} {flags}".split()) == 0
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    whole = result("")
    assert whole["num_prompts"] == whole["completed"] == 20
    assert whole["duration"] > 190
    assert result("--num-prompts 5")["num_prompts"] == 5
    fast = result("--request-rate 2")
    assert fast["request_rate"] == 2
    assert fast["duration"] < 12


def test_what_a_table_was_measured_with_may_be_given(tmp_path: Path) -> None:
    info = {
        "step_cost": msgspec.to_builtins(TABLE),
        "kv_cache": {"num_blocks": 64, "block_size": 16},
        "max_model_len": 1024,
        "settings": {"max_num_seqs": 3, "kv_cache_memory": 2**20, "block_size": 16},
    }
    path = tmp_path / "info.json"
    path.write_text(json.dumps(info))
    assert (
        main(f"simulate --table {path} --num-prompts 3 --input-len 50 --kv-cache-memory 1MiB --block-size 16".split())
        == 0
    )
    assert main(f"simulate --table {path} --num-prompts 3 --kv-cache-memory 2MiB".split()) == 1


def test_the_highest_rate_is_found(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"--table {table} --num-prompts 15 --input-len 100 --output-len 8 --find rate --slo ttft_p99=0.2".split()
    assert main(["simulate", *flags]) == 0
    found = re.search(
        r"^(\S+) requests/s keep the objectives with ([45]) of 5 seeds, (\S+) only",
        capsys.readouterr().out,
        re.MULTILINE,
    )
    assert found
    assert 0 < float(found[1]) < float(found[3])


def test_bisection_ends_between_what_holds_and_what_does_not() -> None:
    found = find_rate(lambda rate, seed: {"failed": 0, "p99_ttft_ms": 100 * rate}, parse_slo("ttft_p99=0.5"))
    assert found.holds <= 5.0 < found.fails <= 1.03 * found.holds
    assert found.hold_at_holds == 5
    assert found.hold_at_fails == 0


@pytest.mark.parametrize(("unlucky", "highest", "kept"), [(1, 5.0, (4, 0)), (2, 0.5, (5, 3)), (4, 0.5, (5, 1))])
def test_a_rate_that_two_of_five_seeds_break_is_not_found(unlucky: int, highest: float, kept: tuple[int, int]) -> None:
    """Make a request take ten times as long with the first seeds."""

    def simulate(rate: float, seed: int) -> dict[str, float]:
        return {"failed": 0, "p99_ttft_ms": (1000 if seed < unlucky else 100) * rate}

    found = find_rate(simulate, parse_slo("ttft_p99=0.5"))
    assert found.holds <= highest < found.fails <= 1.03 * found.holds
    assert (found.hold_at_holds, found.hold_at_fails) == kept
    assert found.runs < 5 * 20


def test_what_never_or_always_holds_is_said_to() -> None:
    with pytest.raises(SettingsError, match="not even"):
        find_rate(lambda rate, seed: {"failed": 1}, {})
    with pytest.raises(SettingsError, match="still keep --slo"):
        find_rate(lambda rate, seed: {"failed": 0}, {})


def test_a_table_is_described_and_what_it_does_not_know_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, path = spread_table(), tmp_path / "table.json"
    table.measured_at, table.machine_load = time.time() - 3725, 1.25
    table.decode.counts = [500, 500, 0]
    path.write_bytes(table.to_json())
    flags = f"simulate --table {path} --num-prompts 40 --input-len 60 --output-len 30 --max-num-seqs 64".split()
    assert main(flags) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"measured 1:02:0\d ago at a load average of 1.2: decodes of 1 to 8 tokens \(1,000 st", printed)
    assert "prefills of 1 to 512 tokens (9 steps), prefills with decodes of 1 to 512 tokens (9 steps). " in printed
    assert re.search(r"99 % of 2,000 steps took at most 1\.[5-9]\d times their cost; the spread is drawn", printed)
    assert re.search(r"\d\d % of the steps' time is of sizes that the table never measured: decodes of up to", printed)
    assert "no spread" not in printed
    assert main([*flags, "--max-concurrency", "4"]) == 0
    assert "never measured" not in capsys.readouterr().out
    path.write_bytes(TABLE.to_json())
    assert main(flags) == 0
    printed = capsys.readouterr().out
    assert "It has no spread: every step takes exactly its cost" in printed
    assert "tails are not predicted" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--sweep max_num_seqs=0", "--max-num-seqs: got '0'; allowed: a whole number, 1 to 65536"),
        ("--sweep max_num_seqs", "--sweep: got 'max_num_seqs'; allowed: NAME=VALUE,VALUE"),
        ("--sweep table=1", "--sweep: got table; allowed: settings, and "),
        ("--sweep input_len=a", "--sweep: input_len: got 'a'; allowed: a number"),
        ("--sweep max_num_seqs=" + ",".join(map(str, range(1, 70))), "69 combinations; allowed: at most 64"),
        ("--find rate", "--find and --slo go together"),
        ("--find rate --slo ttft=1", "--slo: got 'ttft=1'; allowed: ttft, tpot, itl, e2el, each with _mean"),
        ("--num-blocks 0", "--num-blocks: got 0; allowed: 1 to"),
        ("--max-concurrency 0", "--max-concurrency: got 0; allowed: 1 to"),
        ("--goodput itl:3", "--goodput: got 'itl:3'; allowed: ttft, tpot, e2el, a colon"),
        ("--table none.json", "--table: cannot read none.json: No such file"),
        ("--table {bad}", "is wrong: not a table of step costs"),
        ("--table {worse}", "num_blocks: got -1; allowed: a whole number, at least 1"),
        ("--table {list}", "not a JSON object"),
        ("--table /dev/zero", "is wrong: more than"),
        ("--kv-cache-memory 1GiB", "--num-blocks sets the size of the KV cache"),
        ("--dtype float32", "--dtype: got float32; the file of --table was measured with another value"),
        ("--sweep dtype=float32,bfloat16", "--sweep: got dtype; --table was measured with one value"),
        ("--sweep port=1,2", "--sweep: got port; it has no effect here. Settings that are simulated: max_num_seqs, "),
        ("--sweep max_num_seqs=1,2 --html x.html", "--html: --sweep makes many runs"),
        ("--find rate --slo ttft_p99=1 --json x.json", "--json: --find makes many runs"),
        ("--trace x.json --input-len 5", "--input-len: got 5; --trace already has the requests and their times"),
        ("--input-len 0", "--input-len: got 0; allowed: more than 0"),
        ("--max-num-batched-tokens 1", "max_num_batched_tokens (1) must be at least max_num_seqs"),
    ],
)
def test_a_mistake_is_named(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    (tmp_path / "bad").write_text('{"decode": 3}')
    (tmp_path / "list").write_text("[1]")
    (tmp_path / "worse").write_text('{"step_cost": {}, "kv_cache": {"num_blocks": -1}}')
    given = flags.format(**{name: tmp_path / name for name in ("bad", "list", "worse")}).split()
    assert main(["simulate", "--table", str(table), "--num-prompts", "3", *given]) == 1
    assert message in capsys.readouterr().err
