"""Recorded loads, right and wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.config.settings import SettingsError
from app.workload.datasets import read_trace, scaled
from tests.app.simulate.helpers import simulated


def written(path: Path, *lines: object) -> Path:
    file = path / "trace.jsonl"
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return file


def test_the_simulators_own(tmp_path: Path) -> None:
    requests = read_trace(
        written(
            tmp_path,
            {"time": 10.0, "input_tokens": 100, "output_tokens": 5, "prefix": [["system", 64]]},
            {"time": 12.5, "input_tokens": 90, "output_tokens": 5, "prefix": [["system", 64]], "conversation": 1},
            "",
            {"input_tokens": 20, "output_tokens": 7, "conversation": 1, "think_time": 2.0},
        )
    )
    assert [request.arrival for request in requests] == [0.0, 2.5, None]
    records = simulated(requests).records
    assert [record.num_cached_tokens for record in records] == [0, 64, (90 + 5 - 1) // 16 * 16]
    assert records[2].start_time == pytest.approx(records[1].end_time + 2.0)
    assert records[2].num_prompt_tokens == 90 + 5 + 20


def test_mooncakes(tmp_path: Path) -> None:
    requests = read_trace(
        written(
            tmp_path,
            {"timestamp": 27482, "input_length": 1400, "output_length": 52, "hash_ids": [46, 47, 48]},
            {"timestamp": 30535, "input_length": 1100, "output_length": 26, "hash_ids": [46, 47, 2366]},
        )
    )
    assert [request.arrival for request in requests] == pytest.approx([0.0, 3.053])
    assert [record.num_cached_tokens for record in simulated(requests).records] == [0, 1024]


def test_vllms_result(tmp_path: Path) -> None:
    result = {
        "start_times": [7.5, 7.0, 8.0],
        "input_lens": [40, 50, 0],
        "output_lens": [3, 4, 0],
        "errors": ["", "", "x"],
    }
    requests = read_trace(written(tmp_path, result))
    assert [request.arrival for request in requests] == [0.5, 0.0]
    assert [record.num_output_tokens for record in simulated(requests).records] == [3, 4]


def test_a_trace_at_another_rate(tmp_path: Path) -> None:
    lines = [{"time": float(number), "input_tokens": 9, "output_tokens": 2} for number in range(11)]
    requests = scaled(read_trace(written(tmp_path, *lines)), rate=2.2)
    assert [request.arrival for request in requests] == pytest.approx([number / 2 for number in range(11)])


GOOD = {"time": 1.0, "input_tokens": 10, "output_tokens": 5}
MOONCAKE = {"timestamp": 1, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
VLLM = {"start_times": [1.0], "input_lens": [10], "output_lens": [5]}


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        (GOOD | {"output_tokens": 0}, "output_tokens", "0"),
        (GOOD | {"input_tokens": 2.5}, "input_tokens", "2.5"),
        (GOOD | {"input_tokens": True}, "input_tokens", "true"),
        (GOOD | {"time": "soon"}, "time", '"soon"'),
        (GOOD | {"time": -1}, "time", "-1"),
        (GOOD | {"time": 10**400}, "time", "10"),
        (GOOD | {"prefix": [["system", 11]]}, "prefix", '[["system", 11]]'),
        (GOOD | {"prefix": [["system"]]}, "prefix", '[["system"]]'),
        (GOOD | {"prompt": "Hello"}, "prompt", "Hello"),
        ({"time": 1.0, "input_tokens": 10}, "output_tokens", "nothing"),
        ({"input_tokens": 10, "output_tokens": 5, "conversation": 3}, "time", "nothing"),
        (MOONCAKE | {"hash_ids": [1]}, "hash_ids", "[1]"),
        (MOONCAKE | {"hash_ids": ["a", "b"]}, "hash_ids", '["a", "b"]'),
        (MOONCAKE | {"timestamp": None}, "timestamp", "null"),
        (VLLM | {"output_lens": [1, 2]}, "output_lens", "[1, 2]"),
        (VLLM | {"start_times": ["a"]}, "start_times", '["a"]'),
        ({"input_lens": [10], "output_lens": [5]}, "start_times", "nothing"),
    ],
)
def test_a_bad_line_is_named_with_field_and_value(tmp_path: Path, line: dict, field: str, value: str) -> None:
    first = MOONCAKE if "hash_ids" in line else GOOD
    with pytest.raises(SettingsError) as refused:
        read_trace(written(tmp_path, first, line))
    assert "line 2" in str(refused.value)
    assert f"{field}: got {value}"[:40] in str(refused.value).replace('got "Hello"', "got Hello")
    assert "allowed: " in str(refused.value)


@pytest.mark.parametrize("text", ["{", "[1, 2]", "", "\x00", "[" * 100_000, "NaN"])
def test_what_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match="--trace: .*trace.jsonl"):
        read_trace(written(tmp_path, text))


def test_a_line_ends_where_json_lines_end(tmp_path: Path) -> None:
    line = json.dumps(GOOD | {"prefix": [["a\u2028b", 4]]}, ensure_ascii=False)
    (tmp_path / "trace").write_text(f"\ufeff{line}\r\n")
    (request,) = read_trace(tmp_path / "trace")
    assert request.pieces[0] == ("prefix a\u2028b", 4)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot read"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe{}")
    with pytest.raises(SettingsError, match="is no text"):
        read_trace(tmp_path / "bytes")


def test_a_second_time_in_a_conversation(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"line 2: time: got 1.0; allowed: none"):
        read_trace(written(tmp_path, GOOD | {"conversation": 1}, GOOD | {"conversation": 1}))
