"""A workload is what its flags say: drawn with a seed, with the lengths, shared beginnings and gaps that were asked."""

from __future__ import annotations

import json
import statistics
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest

from app.config.settings import SettingsError
from app.workload.datasets import WORDS, WorkloadRequest, add_workload_flags, text_of, token_ids_of, workload


def options(*flags: str) -> Namespace:
    parser = ArgumentParser()
    add_workload_flags(parser)
    return parser.parse_args(flags)


def drawn(*flags: str, seed: int = 0) -> list[WorkloadRequest]:
    return workload(options(*flags), seed=seed)


@pytest.mark.parametrize("dataset", ["random", "sharegpt", "prefix_repetition", "conversation"])
def test_a_seed_says_everything(dataset: str) -> None:
    flags = ("--dataset-name", dataset, "--num-prompts", "50", "--request-rate", "5", "--random-range-ratio", "0.5")
    assert drawn(*flags, seed=3) == drawn(*flags, seed=3)
    assert drawn(*flags, seed=3) != drawn(*flags, seed=4)
    texts = [text_of(request) for request in drawn(*flags, seed=3)]
    assert texts == [text_of(request) for request in drawn(*flags, seed=3)]
    assert len(set(texts)) == 50


def test_random_lengths_are_within_their_range_and_prefixes_are_shared() -> None:
    requests = drawn(
        *("--num-prompts", "400", "--random-input-len", "100", "--random-output-len", "20"),
        *("--random-range-ratio", '{"input": 0.5, "output": 0}', "--random-prefix-len", "30"),
    )
    lengths = [request.num_new_tokens for request in requests]
    assert (min(lengths), max(lengths)) == pytest.approx((80, 180), abs=4)
    assert {request.num_output_tokens for request in requests} == {20}
    first, second = (text_of(request).split() for request in requests[:2])
    assert first[:30] == second[:30]
    assert first[30:60] != second[30:60]
    assert len(first) == lengths[0]
    assert set(first) <= set(WORDS)
    ids, others = (token_ids_of(request, 49152) for request in requests[:2])
    assert len(ids) == lengths[0]
    assert ids[:30] == others[:30]
    assert ids[30:] != others[30:]


@pytest.mark.parametrize(("burstiness", "variation"), [("0.25", 2.0), ("1", 1.0), ("4", 0.5), ("inf", 0.0)])
def test_gaps_are_gamma_distributed_with_the_rate_that_was_asked(burstiness: str, variation: float) -> None:
    flags = ("--num-prompts", "4000", "--request-rate", "8", "--burstiness", burstiness, "--input-len", "1")
    times = [request.arrival or 0.0 for request in drawn(*flags)]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(500)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 8)
    assert statistics.pstdev(gaps) * 8 == pytest.approx(variation, rel=0.1, abs=1e-6)


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_rises_from_the_first_rate_to_the_last(strategy: str) -> None:
    ramp = ("--ramp-up-strategy", strategy, "--ramp-up-start-rps", "2", "--ramp-up-end-rps", "20")
    times = [r.arrival or 0.0 for r in drawn("--num-prompts", "1000", "--burstiness", "inf", *ramp)]
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert gaps[0] == pytest.approx(1 / 2)
    assert gaps[-1] == pytest.approx(1 / 20)
    middle = 11 if strategy == "linear" else 40**0.5
    assert gaps[500] == pytest.approx(1 / middle, rel=0.01)


def test_without_a_rate_all_come_at_once() -> None:
    assert {request.arrival for request in drawn("--num-prompts", "10")} == {0.0}


def test_conversations_go_on_after_a_time_to_think() -> None:
    flags = ("--dataset-name", "conversation", "--num-prompts", "900", "--conversation-turns", "3")
    requests = drawn(*flags, "--request-rate", "6", "--conversation-think-time", "2", "--random-prefix-len", "9")
    assert [r.conversation for r in requests[:4]] == [0, 0, 0, 1]
    assert [r.arrival is None for r in requests[:4]] == [False, True, True, False]
    assert max(r.arrival or 0.0 for r in requests) == pytest.approx(150)  # 900 in all at 6 per second
    assert statistics.fmean(r.think_time for r in requests if r.arrival is None) == pytest.approx(2, rel=0.1)
    assert [len(r.pieces) for r in requests[:4]] == [2, 1, 1, 2]


def test_lengths_like_those_of_sharegpt() -> None:
    requests = drawn("--dataset-name", "sharegpt", "--num-prompts", "4000")
    assert statistics.fmean(r.num_new_tokens for r in requests) == pytest.approx(190, rel=0.1)
    assert statistics.fmean(r.num_output_tokens for r in requests) == pytest.approx(195, rel=0.1)
    assert {r.num_output_tokens for r in drawn("--dataset-name", "sharegpt", "--output-len", "7")} == {7}


def test_a_file_of_sharegpt(tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.json"
    turns = [
        ("a question of some length", "an answer that is about as long"),
        ("no", "short"),
        ("long" * 2000, "x" * 40),
    ]
    talks = [{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in turns]
    file.write_text(json.dumps([*talks, {"conversations": []}]))
    requests = drawn("--dataset-name", "sharegpt", "--dataset-path", str(file), "--num-prompts", "3")
    assert {text_of(request) for request in requests} == {turns[0][0]}
    assert {request.num_output_tokens for request in requests} == {len(turns[0][1]) // 4}


def test_a_prompt_may_have_any_character(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one\u2028two\x85three"}\n')
    (request,) = drawn("--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts", "1")
    assert request.text == "one\u2028two\x85three"


def test_a_file_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"prompt": "two", "output_tokens": 5}\n')
    requests = drawn("--dataset-name", "custom", "--dataset-path", str(file), "--num-prompts", "4")
    assert sorted((text_of(r), r.num_output_tokens) for r in requests) == [("one", 256)] * 2 + [("two", 5)] * 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--num-prompts", "0"), "--num-prompts: got 0"),
        (("--burstiness", "-1"), "--burstiness: got -1.0"),
        (("--random-range-ratio", "1.5"), "--random-range-ratio: got '1.5'"),
        (("--dataset-path", "x"), "reads no file"),
        (("--dataset-name", "sharegpt", "--dataset-path", "/nowhere"), "cannot read /nowhere: No such file"),
        (("--dataset-name", "custom"), "needs a file"),
        (("--ramp-up-strategy", "linear"), "--ramp-up-start-rps"),
        (("--ramp-up-strategy", "linear", "--request-rate", "2"), "--request-rate and --ramp-up-strategy exclude"),
    ],
)
def test_what_cannot_be_is_refused_by_name(flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        drawn(*flags)


@pytest.mark.parametrize("dataset", ["sharegpt", "custom"])
@pytest.mark.parametrize(
    "text", ["", "7", "{}", "[3]", '{"conversations": 5}', '[{"conversations": [1, 2]}]', "\0", '["prompt"]']
)
def test_a_file_of_something_else_is_refused(dataset: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    with pytest.raises(SettingsError, match="--dataset-path: "):
        drawn("--dataset-name", dataset, "--dataset-path", str(file), "--num-prompts", "2")
