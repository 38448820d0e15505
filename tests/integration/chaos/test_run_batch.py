"""`headrace run-batch` as a process: interrupted or killed, it goes on where it was."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import REPOSITORY
from tests.support.tiny_model import tiny_settings

ROWS = 200
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40}


def start(source: Path, output: Path, **settings: Any) -> subprocess.Popen[str]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in tiny_settings(num_threads=1, **settings).items()]
    command = [sys.executable, "-m", "app", "run-batch", "-i", str(source), "-o", str(output), *flags]
    return subprocess.Popen(command, cwd=REPOSITORY, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE)


def write_rows(path: Path, *bodies: dict[str, Any], url: str = "/v1/chat/completions") -> Path:
    rows = ({"custom_id": str(n), "method": "POST", "url": url, "body": body} for n, body in enumerate(bodies))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def custom_ids(path: Path) -> list[int]:
    return sorted(int(json.loads(line)["custom_id"]) for line in path.read_text().splitlines())


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_the_same_command_goes_on_where_it_was_ended(tmp_path: Path, number: signal.Signals, status: int) -> None:
    source, output = write_rows(tmp_path / "in", *[CHAT] * ROWS), tmp_path / "out"
    process = start(source, output, max_num_seqs=2)
    while not output.exists() or output.stat().st_size < 2000:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    words = process.communicate(timeout=60)[1]
    assert process.returncode == status
    assert "Traceback" not in words
    before = output.read_bytes()
    assert before.count(b"\n") < ROWS
    process = start(source, output)
    words = process.communicate(timeout=300)[1]
    assert process.returncode == 0, words
    assert f"{ROWS} of {ROWS} rows are in {output}, 0 of them errors" in words
    assert custom_ids(output) == list(range(ROWS))
    assert output.read_bytes().startswith(before[: before.rindex(b"\n") + 1])


def test_rows_that_fail_are_in_the_output_and_a_wrong_file_is_refused_at_once(tmp_path: Path) -> None:
    output = tmp_path / "out"
    source = write_rows(tmp_path / "in", CHAT, {"messages": []}, CHAT | {"model": "other"})
    process = start(source, output)
    words = process.communicate(timeout=300)[1]
    assert (process.returncode, custom_ids(output)) == (1, [0, 1, 2])
    assert "2 of them errors" in words
    wrong = write_rows(tmp_path / "wrong", CHAT, {"stream": True})
    (tmp_path / "notes").write_text("no line break")
    for source_file, output_file, word in (
        (wrong, tmp_path / "other", "line 2: body.stream"),
        (source, wrong, "--output-file"),
        (source, tmp_path / "notes", "--output-file"),
        (tmp_path / "missing", output, "missing: No such file"),
    ):
        process = start(source_file, output_file)
        words = process.communicate(timeout=60)[1]
        assert (process.returncode, word in words) == (1, True), words
    assert not (tmp_path / "other").exists()
    assert wrong.read_text().count("\n") == 2
    assert (tmp_path / "notes").read_text() == "no line break"
