"""Who would wait too long is refused at once, and let in when it was told to come back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.harness import Server
from tests.support.tiny_model import tiny_server

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "Wait", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tiny_server(max_num_seqs=1, max_queue_time=3) as running:
        yield running.wait_ready()


@pytest.mark.slow
def test_who_would_wait_too_long_is_refused_and_let_in_when_told_to_come_back(server: Server) -> None:
    began = time.monotonic()
    for _ in range(3):
        assert server.post(COMPLETIONS, LONG).status_code == 200
    each = (time.monotonic() - began) / 3
    with ExitStack() as stack:
        clients = [stack.enter_context(server.connect()) for _ in range(4 + int(12.0 / each))]
        for client in clients:
            client.post(COMPLETIONS, LONG)
        rejected = "vllm:admission_rejections_total{reason=max_queue_time}"
        waiting = "vllm:num_requests_waiting"  # told with the next step
        seen = server.poll(lambda: server.metrics().samples, lambda found: found[rejected] > 0 and found[waiting] > 0)
        assert seen["headrace:queued_seconds"] > 0.0
        # On a busy machine the server may read the last request when earlier ones have ended, and admit it.
        refused = None
        for client in reversed(clients):
            head = client.read_head()
            if head.status_code == 429:
                refused = json.loads(client.read_body())["error"]
                break
        assert refused is not None
        assert refused["code"] == "queue_full"
        assert "the first token is expected after" in refused["message"]
        again = int(dict(head.headers)[b"retry-after"])
        for _ in range(10):  # the machine may have become slower meanwhile
            time.sleep(again)
            answer = server.post(COMPLETIONS, LONG)
            if answer.status_code == 200:
                break
            again = int(answer.headers["retry-after"])
        assert answer.status_code == 200
    samples = server.metrics().samples
    assert samples["vllm:admission_rejections_total{reason=max_queue_time}"] >= 1
    assert samples["headrace:queue_wait_error_seconds_bucket{le=+Inf}"] >= 1
