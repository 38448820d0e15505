"""latency, throughput and startup: the keys of vLLM's results, and figures that belong together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.bench.offline import _text, open_llm
from app.commands.cli import main
from app.config.settings import Settings
from app.config.sources import load_settings
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.seconds


def bench(directory: Path, command: str, *flags: str) -> dict[str, Any]:
    model = write_tiny_model(directory / "tiny", vocab_size=2048)
    file = directory / "result.json"
    settings = ("--model", str(model), "--load-format", "dummy", "--kv-cache-memory", "16MiB", "--max-model-len", "512")
    assert main(["bench", command, *settings, *flags, "--output-json", str(file)]) == 0
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def test_latency_of_a_batch_has_the_keys_of_vllms_result(tmp_path: Path) -> None:
    sizes = (
        "--input-len",
        "8",
        "--output-len",
        "4",
        "--batch-size",
        "3",
        "--num-iters-warmup",
        "1",
        "--num-iters",
        "5",
    )
    result = bench(tmp_path, "latency", *sizes)
    assert result.keys() >= {"avg_latency", "latencies", "percentiles"}
    assert len(result["latencies"]) == 5
    assert min(result["latencies"]) <= result["percentiles"]["50"] <= max(result["latencies"])
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]


def test_throughput_of_many_prompts_counts_every_token(tmp_path: Path) -> None:
    result = bench(tmp_path, "throughput", "--num-prompts", "12", "--input-len", "16", "--output-len", "5")
    assert (result["num_requests"], result["total_num_tokens"], result["total_output_tokens"]) == (12, 252, 60)
    assert result["requests_per_second"] == pytest.approx(12 / result["elapsed_time"])
    assert result["tokens_per_second"] == pytest.approx(252 / result["elapsed_time"])


def test_answers_that_the_context_cuts_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(tmp_path, "throughput", "--num-prompts", "2", "--input-len", "500", "--output-len", "50")
    assert (result["total_output_tokens"], result["requested_output_tokens"]) == (24, 100)
    assert "cut at the context of 512 tokens (max_model_len): 100 output tokens" in capsys.readouterr().out
    with pytest.raises(AssertionError):
        bench(tmp_path, "latency", "--input-len", "500", "--output-len", "50")
    assert "--output-len: got 50 and 500 prompt tokens; allowed: 512 in sum" in capsys.readouterr().err


def test_no_other_file_is_read_than_the_one_that_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_model(tmp_path / "tiny", vocab_size=2048)
    named, other = tmp_path / "named.toml", tmp_path / "other.toml"
    named.write_text(f'model = "{model}"\nload_format = "dummy"\nkv_cache_memory = "16MiB"')
    other.write_text("max_model_len = 128")
    monkeypatch.setenv("HEADRACE_CONFIG", str(other))
    llm = open_llm(load_settings({"block_size": 32}, named), max_num_seqs=3, block_size=8)
    assert llm.core.config.max_model_len == 8192
    assert (llm.core.config.max_num_seqs, llm.core.executor.block_size) == (3, 32)


def test_sizes_are_handed_on_exactly() -> None:
    size = 1_500_000_001
    assert Settings(kv_cache_memory=_text(Settings(kv_cache_memory=size).kv_cache_memory)).kv_cache_memory == size


@pytest.mark.slow
def test_cold_and_warm_starts_have_their_phases_in_order(tmp_path: Path) -> None:
    starts = ("--num-iters-cold", "1", "--num-iters-warmup", "0", "--num-iters-warm", "1")
    result = bench(tmp_path, "startup", *starts)
    for kind in ("cold", "warm"):
        assert result[f"{kind}_startup_times"] == [result[f"avg_{kind}_startup_time"]]
        first, ready, token = (result[f"avg_{kind}_{phase}_time"] for phase in ("answer", "startup", "first_token"))
        assert 0 < first <= ready < token


@pytest.mark.parametrize(
    ("command", "flags", "said"),
    [
        ("latency", ["--batch-size", "0"], "--batch-size: got 0"),
        ("throughput", ["--dataset-name", "conversation"], "conversations need a server"),
        ("throughput", ["--n", "0"], "--n: got 0"),
    ],
)
def test_a_wrong_flag_is_one_line(
    command: str, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", command, *flags]) == 1
    assert said in capsys.readouterr().err
