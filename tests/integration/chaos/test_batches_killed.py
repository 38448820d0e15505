"""A batch outlives its server: killed or ended in the middle, every row is in the output once."""

from __future__ import annotations

import json
import operator
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.harness import Server
from tests.support.tiny_model import tiny_server

ROWS = 400


def start(folder: Path, **settings: Any) -> Server:
    return tiny_server(files_dir=folder, max_batch_rows=4, **settings)


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="any", timeout=120)


def create(client: openai.OpenAI, count: int, **body: Any) -> str:
    line = {"method": "POST", "url": "/v1/completions", "body": {"ignore_eos": True, "prompt": "a"} | body}
    content = "".join(json.dumps({"custom_id": f"row {number}"} | line) + "\n" for number in range(count))
    file = client.files.create(file=content.encode(), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id


def wait(server: Server, batch_id: str, *statuses: str, completed: int = 0) -> Any:
    batches: Any = client_of(server).batches
    return server.poll(
        lambda: batches.retrieve(batch_id),
        lambda batch: batch.status in statuses and batch.request_counts.completed >= completed,
        interval=0.05,
    )


def custom_ids(server: Server, file_id: str) -> list[str]:
    content = client_of(server).files.content(file_id).content
    assert content.endswith(b"\n")
    return [json.loads(line)["custom_id"] for line in content.splitlines()]


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("times", [3])
def test_every_row_is_answered_once_however_often_the_server_ends(
    tmp_path: Path, number: signal.Signals, times: int
) -> None:
    batch_id, written = "", 0
    folder = tmp_path / "files"
    for _ in range(times):
        with start(folder) as server:
            server.wait_ready()
            batch_id = batch_id or create(client_of(server), ROWS, max_tokens=40)
            output = folder / f"file-{batch_id.removeprefix('batch_')}-output"
            server.poll(partial(size_of, output), partial(operator.lt, written), 0.001)
            time.sleep(0.05)
            if number is signal.SIGKILL:
                server.kill()
            else:
                assert server.stop() == 0
            lines = output.read_bytes().splitlines(keepends=True)
            written = sum(map(len, lines))
            assert len(lines) < ROWS, "the batch was over before the server was ended"
    with start(folder) as server:
        server.wait_ready()
        batch = wait(server, batch_id, "completed")
        assert (batch.request_counts.total, batch.request_counts.completed) == (ROWS, ROWS)
        assert sorted(custom_ids(server, batch.output_file_id)) == sorted(f"row {number}" for number in range(ROWS))
        assert batch.usage.output_tokens == 40 * ROWS
        assert batch.error_file_id is None


def test_a_second_server_of_the_folder_takes_over(tmp_path: Path) -> None:
    with start(tmp_path) as first, start(tmp_path) as second:
        for server in (first, second):
            server.wait_ready()
        batch_id = create(client_of(second), 4000, max_tokens=40)  # by the one that does not run it
        wait(second, batch_id, "in_progress", completed=1)
        first.kill()
        wait(second, batch_id, "in_progress")
        client_of(second).batches.cancel(batch_id)
        batch = wait(second, batch_id, "cancelled")
        found = custom_ids(second, batch.output_file_id)
        assert len(found) == len(set(found)) == batch.request_counts.completed < 4000


def test_fifty_thousand_rows(tmp_path: Path) -> None:
    with start(tmp_path) as server:
        server.wait_ready()
        batch_id = create(client_of(server), 50_000, max_tokens=1)
        wait(server, batch_id, "in_progress", completed=100)
        client_of(server).batches.cancel(batch_id)
        batch = wait(server, batch_id, "cancelled")
        assert batch.request_counts.total == 50_000
        found = custom_ids(server, batch.output_file_id)
        assert len(found) == len(set(found)) == batch.request_counts.completed
