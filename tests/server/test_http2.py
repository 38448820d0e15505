"""Over HTTP/2 a request is a stream of its own: what happens to one is nothing to the others on its connection."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.server.harness import TIMEOUT, Server
from tests.server.http2_client import Http2Client
from tests.server.raw_client import sse_events
from tests.server.test_client_gone import PHASES, SLOTS, case_name
from tests.server.tiny_model import tiny_server
from tests.server.victims import LONG, PATH, SHORT, endless

STORY: dict[str, Any] = {
    "prompt": "A headrace is a channel that",
    "temperature": 0,
    "ignore_eos": True,
    "max_tokens": 60,
}

_ALL = list(itertools.product(PHASES, [True, False], [1, 4]))
_CROSS_SECTION = [
    ("queued", True, 4),
    ("queued", False, 1),
    ("prefilling", True, 1),
    ("prefilling", False, 4),
    ("decoding", True, 4),
    ("decoding", False, 1),
    ("just_sent", True, 1),
    ("just_sent", False, 4),
]
_EVERY_LOOP = pytest.mark.parametrize("narrow_tiny_server", ["uvloop", "asyncio", "trio"], indirect=True)


def connect(server: Server, window: int | None = None) -> Http2Client:
    return Http2Client(server.port, timeout=TIMEOUT, window=window)


@cache
def _alone(server: Server) -> str:
    """What the story says when nobody else is there."""
    server.wait_idle()
    return server.complete(**STORY)["choices"][0]["text"]


@pytest.mark.parametrize(("phase", "stream", "n"), _ALL, ids=case_name)
@pytest.mark.parametrize("narrow_tiny_server", ["uvloop"], indirect=True, scope="session")
def test_stream_reset_aborts_its_request_and_no_other(
    narrow_tiny_server: Server, phase: str, stream: bool, n: int
) -> None:
    check_stream_reset(narrow_tiny_server, phase, stream, n)


@pytest.mark.parametrize(("phase", "stream", "n"), _CROSS_SECTION, ids=case_name)
@pytest.mark.parametrize("narrow_tiny_server", ["asyncio", "trio"], indirect=True, scope="session")
def test_stream_reset_aborts_its_request_on_every_event_loop(
    narrow_tiny_server: Server, phase: str, stream: bool, n: int
) -> None:
    check_stream_reset(narrow_tiny_server, phase, stream, n)


def check_stream_reset(server: Server, phase: str, stream: bool, n: int) -> None:
    alone = _alone(server)
    before = server.wait_idle()
    with connect(server) as client, server.connect() as crowd:
        if phase == "queued":
            crowd.post(PATH, endless(stream=True, n=SLOTS))
            server.wait_until(lambda now: now.running == SLOTS)
        else:
            streamed = client.post(PATH, {**STORY, "stream": True})
            client.read_head(streamed)  # it is generated from here on, beside the victim
        start = server.metrics()

        at_once = phase == "just_sent"
        victim = client.post(PATH, endless(LONG if phase == "prefilling" else SHORT, stream=stream, n=n), flush=False)
        if not at_once:
            client.flush()
            PHASES[phase](server, start, n)
        if stream and phase == "decoding":
            assert client.read_head(victim)[":status"] == "200"
        behind = client.post(PATH, STORY, flush=False)
        client.reset(victim)
        end = server.wait_until(lambda now: now.aborted > before.aborted)
        if phase == "queued":
            end = server.wait_until(lambda now: now.waiting == 1)  # only the one behind
            assert end.computed_tokens == start.computed_tokens, "a request reset while queued is never prefilled"
            crowd.leave_with_rst()
        else:
            chunks = list(sse_events(client.chunks(streamed)))
            assert chunks.pop() == "[DONE]"
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == alone
        assert client.read_json(behind)["choices"][0]["text"] == alone

    after = server.wait_idle()
    assert after.finished["error"] == 0
    assert after.aborted == before.aborted + (2 if phase == "queued" else 1)
    if phase == "prefilling":
        assert after.computed_tokens - start.computed_tokens < LONG, "nor is its prefill finished"


_WAYS_TO_LEAVE: dict[str, Callable[[Http2Client], None]] = {
    "goaway": Http2Client.say_goodbye,
    "fin": Http2Client.leave_with_fin,
    "rst": Http2Client.leave_with_rst,
}


@_EVERY_LOOP
@pytest.mark.parametrize("how", _WAYS_TO_LEAVE)
def test_connection_lost_aborts_all_of_its_streams_in_whatever_phase(narrow_tiny_server: Server, how: str) -> None:
    server = narrow_tiny_server
    alone = _alone(server)
    before = server.wait_idle()
    with connect(server) as client, connect(server) as other:
        client.post(PATH, endless(stream=True))
        client.post(PATH, endless(stream=False, n=2))
        server.wait_until(lambda now: now.running == 3)
        spared = other.post(PATH, STORY)
        client.post(PATH, endless(LONG, stream=True))
        client.post(PATH, endless(stream=False, n=4))
        client.post(PATH, endless(stream=True))
        # All ten choices are known, also if the spared one has ended by now: a reset would overtake the last request.
        length = before.finished["length"]
        server.wait_until(lambda now: now.running + now.waiting + now.finished["length"] - length == 10)
        _WAYS_TO_LEAVE[how](client)
        server.wait_until(lambda now: now.aborted == before.aborted + 5)
        assert other.read_json(spared)["choices"][0]["text"] == alone
        after = server.wait_idle()
    assert after.finished == before.finished | {
        "abort": before.aborted + 5,
        "length": before.finished["length"] + 1,
    }


@_EVERY_LOOP
def test_client_gone_that_took_no_byte_of_its_answer_leaves_nothing_behind(narrow_tiny_server: Server) -> None:
    """The answer is complete and waits for a window that never opens."""
    server = narrow_tiny_server
    before = server.wait_idle()
    client = connect(server, window=0)
    for stream in (False, True):
        client.post(PATH, {**STORY, "stream": stream, "max_tokens": 200})
    server.wait_until(lambda now: now.generation_tokens == before.generation_tokens + 400)
    descriptors = server.metrics().samples["process_open_fds"]
    client.leave_with_rst()
    after = server.wait_until(lambda now: now.http_requests(PATH, "2xx") == before.http_requests(PATH, "2xx") + 2)
    server.wait_until(lambda now: now.samples["process_open_fds"] < descriptors)
    assert sum(after.finished.values()) == sum(before.finished.values()) + 2


def test_stalled_stream_is_cut_and_its_connection_goes_on() -> None:
    with tiny_server(send_timeout=0.5) as server:
        server.wait_ready()
        with connect(server, window=0) as client:
            stalled = client.post(PATH, endless(stream=True))
            assert client.read_head(stalled)[":status"] == "200"
            client.wait_reset(stalled)
            assert server.wait_idle().aborted == 1
            client.open_windows()
            assert len(client.read_json(client.post(PATH, STORY))["choices"]) == 1
