"""What must hold on each of Hypercorn's event loops, beside the clients that leave (`test_client_gone`)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.selection import slow_except
from tests.support.harness import Server
from tests.support.raw_client import sse_events

# `test_client_gone` talks to the other two.
pytestmark = pytest.mark.parametrize(
    "narrow_server", slow_except(["uvloop", "asyncio", "trio"], "asyncio"), indirect=True, scope="session"
)


@pytest.mark.slow
def test_stream_and_whole_answer_agree(narrow_server: Server) -> None:
    body: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    whole = narrow_server.complete(**body)["choices"][0]["text"]
    with narrow_server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        *chunks, done = sse_events(answer.iter_bytes())
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole


def test_chat_knows_paris(narrow_server: Server) -> None:
    answer = narrow_server.chat("What is the capital of France?", max_tokens=16)
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_refusals_are_in_the_envelope(narrow_server: Server) -> None:
    for path, body, status in [
        ("/v1/completions", b"{", 400),
        ("/v1/completions", b'{"prompt": ""}', 400),
        ("/v1/completions", b'{"prompt": "a", "model": "other"}', 404),
        ("/nowhere", b"{}", 404),
        ("/health", b"{}", 405),
    ]:
        answer = narrow_server.client.post(path, content=body)
        assert answer.status_code == status
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


def test_first_events_reach_a_client_before_the_last_are_made(narrow_server: Server) -> None:
    """Nothing on the way holds events back."""
    narrow_server.wait_idle()
    with narrow_server.connect() as client:
        body: dict[str, Any] = {"prompt": "On and on", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        client.post("/v1/completions", body)
        assert client.read_head().status_code == 200
        event = next(sse_events(client.chunks()))
        assert json.dumps(event)
        assert narrow_server.metrics().running == 1
    narrow_server.wait_idle()


def test_queued_stream_gets_its_headers_while_it_waits(narrow_server: Server) -> None:
    """So that neither client nor proxy takes a full server for a dead one."""
    narrow_server.wait_idle()
    with narrow_server.connect() as busy, narrow_server.connect() as queued:
        body: dict[str, Any] = {"prompt": "On and on", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        busy.post("/v1/completions", {**body, "n": 5})
        narrow_server.wait_until(lambda now: now.running == 5)
        queued.post("/v1/completions", body)
        assert queued.read_head().status_code == 200
        narrow_server.wait_until(lambda now: now.waiting == 1)
    narrow_server.wait_idle()
