"""The comparison with other servers: it counts what real servers gave, lets them take turns, and divides rightly."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from gpu.checkpoint import ModelFiles, open_model
from gpu.weights.tensors import weights_of
from loadtest.compare import RATIOS, Comparison, Record, figures_table, ratio_table
from loadtest.export_model import export_model
from loadtest.peers import HEADRACE, LLAMA, VLLM
from loadtest.servers import Server, headrace
from tests.support.embedded_model import embedded_gguf
from tests.support.tiny_model import NAME, write_tiny_model


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / NAME)


def tiny(name: str, model: Path) -> Server:
    return headrace(name, model=model, served_model_name=NAME, load_format="dummy", kv_cache_memory="16MiB")


def wait_until_stopped(pid: int, stopped: bool) -> None:
    """A signal takes its time until every thread has heard it."""
    end = time.monotonic() + 60
    while (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T") != stopped:
        assert time.monotonic() < end, "the signal was never heard"
        time.sleep(0.01)


@pytest.mark.slow
def test_two_servers_take_turns_and_are_gone_afterwards(tiny_model: Path) -> None:
    servers = [tiny(HEADRACE, tiny_model), tiny(LLAMA, tiny_model)]
    comparison = Comparison(servers, num_starts=1)
    comparison.run([1, 8], num_rounds=2, scale=0.25)
    for record in comparison.records.values():
        assert [len(record.streams[number]) for number in (1, 8)] == [2, 2]
        assert [figures["requests"] for figures in record.streams[8]] == [8, 8]
        assert [figures["prompt_tokens"] for figures in record.prefill] == [2 * 480, 2 * 480]
        assert 0 < record.answers[0] <= record.starts[0]
        assert all(figures["server_cpu_seconds"] > 0 and figures["rss_mib"] > 100 for figures in record.streams[8])
    assert len(ratio_table(comparison.records).splitlines()) == 2 + len(RATIOS)
    assert figures_table(comparison.records).count(f"| {LLAMA} |") == 3
    for server in servers:
        assert server.target.pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(server.target.pid, 0)


@pytest.mark.slow
def test_a_paused_server_stands_still_until_its_turn(tiny_model: Path) -> None:
    server = tiny("alone", tiny_model)
    with server as target:
        assert target.pid is not None
        server.pause()
        wait_until_stopped(target.pid, True)
        server.resume()
        wait_until_stopped(target.pid, False)
        figures = target.measure(2, 4, seed=1, reconnect=True, prompt_words=8, max_tokens=4)
        assert (figures["requests"], figures["tokens"], figures["failed"]) == (4, 16, {})
        assert (figures["shortest_prompt"], figures["longest_prompt"]) == (8, 8)
        server.pause()
    assert server._process.returncode == 0, "it was let go on, heard SIGTERM and drained"


@pytest.mark.slow
def test_a_server_that_does_not_become_ready_is_ended_and_its_words_are_shown(tmp_path: Path) -> None:
    server = headrace("misled", model=tmp_path / "nothing.gguf")
    with pytest.raises(SystemExit, match=r"(?s)misled did not become ready.*nothing\.gguf"):
        server.__enter__()
    assert server._process.poll() is not None


def record(speed: float, ttft: float, prefill: float, start: float) -> Record:
    rounds = [{"tokens_per_second": speed * factor, "first_ttft_ms": {"p50": ttft}} for factor in (1, 2, 4)]
    return Record(
        starts=[start, 9 * start, start],
        streams=dict.fromkeys((1, 8), rounds),
        prefill=[{"prompt_tokens": 480, "seconds": 480 / prefill}],
    )


def test_ratios_are_of_the_same_round_and_are_held_against_their_targets() -> None:
    records = {HEADRACE: record(300, 50, 1000, 1), VLLM: record(100, 100, 800, 30), LLAMA: record(100, 100, 100, 0.2)}
    lines = dict(line.strip("| ").split(" | ", 1) for line in ratio_table(records).splitlines()[2:])
    assert lines["1 stream, tok/s"] == "≥ 6× | 3.00× (3.00 to 3.00): missed | ≥ 1.5× | 3.00× (3.00 to 3.00)"
    assert lines["8 streams, tok/s"] == "≥ 3× | 3.00× (3.00 to 3.00) | ≥ 4× | 3.00× (3.00 to 3.00): missed"
    assert lines["32 streams, tok/s"] == "≥ 2.5× | not measured | ≥ 5× | not measured"
    assert lines["prefill, tok/s"] == "≥ 2× | 1.25× (1.25 to 1.25): missed | ≥ 5× | 10.00× (10.00 to 10.00)"
    ttft = lines["TTFT p50, 8 streams arriving together"]
    assert ttft == "≤ 0.4× | 0.50× (0.50 to 0.50): missed | ≤ 0.12× | 0.50× (0.50 to 0.50): missed"
    assert lines["start to ready"] == "≤ 0.05× | 0.03× (0.03 to 0.03) | ≤ 2× | 5.00× (5.00 to 5.00): missed"


@pytest.mark.slow
def test_an_exported_model_has_the_weights_the_tokens_and_the_template_of_its_file(tmp_path: Path) -> None:
    original = open_model(str(embedded_gguf()))
    exported = open_model(str(export_model(original, tmp_path / "model")))
    text = "Hello, world!\n  12 mills <|im_end|>"
    assert exported.tokenizer.encode(text).ids == original.tokenizer.encode(text).ids
    assert exported.chat_template == original.chat_template
    assert exported.special_tokens == original.special_tokens
    assert exported.config.eos_token_ids == original.config.eos_token_ids
    assert exported.config.rope_theta == original.config.rope_theta
    ours, theirs = weights(original), weights(exported)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, ours[name]), name


def weights(files: ModelFiles) -> dict[str, torch.Tensor]:
    """In bfloat16."""
    return {name: tensor.to(torch.bfloat16) for name, tensor in weights_of(files)}
