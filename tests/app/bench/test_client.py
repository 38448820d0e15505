"""The client reads whatever a server may write, however it is cut, and says why a request has failed."""

from __future__ import annotations

import asyncio
import ssl
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from app.bench.driver import Driver
from app.client import ConnectionPool
from app.config.settings import SettingsError
from app.workload.datasets import Piece, WorkloadRequest
from app.workload.report import RequestRecord, summarize
from tests.app.bench.scripted_server import SSE_HEAD, Script, chunk, event, scripted, usage
from tests.selection import slow_except

TEXTS = [" one", " two", " three"]
STREAM = [": ping\n\n", *map(event, TEXTS), event("", "length"), usage(11, 3, 8), "data: [DONE]\n\n"]
LAST = b"0\r\n\r\n"


def requests(number: int) -> list[WorkloadRequest]:
    return [WorkloadRequest((Piece(f"{each}", 4),), 3) for each in range(number)]


def drive(
    script: Script, workload: list[WorkloadRequest], *, timeout: float = 20.0, **options: Any
) -> list[RequestRecord]:
    async def run(url: str) -> list[RequestRecord]:
        pool = ConnectionPool(url, {}, timeout=timeout)
        return await Driver(pool, options.pop("path", "/v1/completions"), {"model": "m"}, **options).run(workload)

    with scripted(script) as server:
        return asyncio.run(run(server.url))


def by(*pieces: bytes, pause: float = 0.0) -> Script:
    """The same answer for everybody."""

    async def script(_body: dict[str, Any]) -> AsyncIterator[bytes]:
        for piece in pieces:
            await asyncio.sleep(pause)
            yield piece

    return script


WHOLE = b"".join([SSE_HEAD, *map(chunk, STREAM), LAST])
CRLF = b"".join([SSE_HEAD, *(chunk(part.replace("\n", "\r\n")) for part in STREAM), LAST])
PLAIN = "".join(STREAM).encode()
FRAMINGS = {
    "in one piece": [WHOLE],
    "byte by byte": [WHOLE[at : at + 1] for at in range(len(WHOLE))],
    "by threes": [WHOLE[at : at + 3] for at in range(0, len(WHOLE), 3)],
    "CRLF": [CRLF],
    "CRLF by fives": [CRLF[at : at + 5] for at in range(0, len(CRLF), 5)],
    "one chunk for all": [SSE_HEAD, chunk("".join(STREAM)), LAST],
    "a chunk for each byte": [SSE_HEAD, *(chunk(letter) for letter in "".join(STREAM)), LAST],
    "no space after data": [SSE_HEAD, chunk("".join(STREAM).replace("data: ", "data:")), LAST],
    "chunk extensions": [SSE_HEAD, WHOLE[len(SSE_HEAD) :].replace(b"\r\ndata", b";x=1\r\ndata")],
    "a known length": [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(PLAIN), PLAIN],
    "until it closes": [b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", PLAIN, b""],
    "early hints": [b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" * 2000, WHOLE],
    "trailers": [WHOLE.removesuffix(b"\r\n") + b"digest: x\r\n", b"\r\n"],
    "a last chunk with an extension": [WHOLE.removesuffix(LAST) + b"000;x=1\r\n\r\n"],
}


@pytest.mark.slow
@pytest.mark.parametrize("pieces", FRAMINGS.values(), ids=FRAMINGS.keys())
def test_any_framing_is_read_alike(pieces: list[bytes]) -> None:
    for record in drive(by(*pieces), requests(3), max_concurrency=1):
        assert record.error == ""
        assert record.text == " one two three"
        assert len(record.token_times) == 3
        assert (record.num_prompt_tokens, record.num_output_tokens, record.num_cached_tokens) == (11, 3, 8)
        assert record.start_time <= record.token_times[0] <= record.token_times[-1] <= record.end_time


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's times are Linux's")
def test_pieces_have_the_times_at_which_they_came_and_not_at_which_they_were_looked_at() -> None:
    sent: list[tuple[float, float]] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def script(_body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield SSE_HEAD
        for part in STREAM[1:4]:
            loops[0].call_soon_threadsafe(time.sleep, 0.2)  # somebody keeps the client's event loop
            await asyncio.sleep(0.1)
            began = perf_counter()
            yield chunk(part)
            sent.append((began, perf_counter()))
            await asyncio.sleep(0.3)
        yield b"".join(map(chunk, STREAM[4:])) + LAST

    async def run(url: str) -> list[RequestRecord]:
        loops.append(asyncio.get_running_loop())
        return await Driver(ConnectionPool(url, {}), "/v1/completions", {}).run(requests(1))

    with scripted(script) as server:
        (record,) = asyncio.run(run(server.url))
    assert record.error == ""
    for (began, ended), at in zip(sent, record.token_times, strict=True):
        assert began - 0.002 <= at <= ended + 0.002


def test_a_chat_counts_from_its_first_text() -> None:
    def delta(fields: str, reason: str = "null") -> str:
        return f'data: {{"choices": [{{"index": 0, "delta": {{{fields}}}, "finish_reason": {reason}}}]}}\n\n'

    parts = [delta('"role": "assistant", "content": ""'), delta('"reasoning_content": "hm"'), delta('"content": "Hi"')]
    parts += [delta("", '"stop"'), usage(5, 2), "data: [DONE]\n\n"]
    script = by(SSE_HEAD, *map(chunk, parts), LAST, pause=0.02)
    (record,) = drive(script, requests(1), path="/v1/chat/completions")
    assert (record.error, record.text, len(record.token_times)) == ("", "Hi", 2)
    assert record.ttft >= 0.055


def answer(status: str, body: bytes, headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status.encode(), headers, len(body), body)


BROKEN = {
    "HTTP 429 queue_full": [answer("429 Too Many", b'{"error": {"code": "queue_full"}}', b"Retry-After: 7\r\n")],
    "HTTP 400 invalid_request_error": [
        answer("400 Bad", b'{"error": {"code": null, "type": "invalid_request_error"}}')
    ],
    "HTTP 502": [answer("502 Bad Gateway", b"<html>no</html>")],
    "connection closed before an answer": [b""],
    "connection closed in mid-answer": [SSE_HEAD, chunk(STREAM[1]), b""],
    "the stream broke off": [SSE_HEAD, chunk(STREAM[1]), LAST],
    "no text came": [SSE_HEAD, chunk("data: [DONE]\n\n"), LAST],
    "error event request_failed": [SSE_HEAD, chunk('data: {"error": {"code": "request_failed"}}\n\n'), LAST],
    "HTTP 503": [answer("503 Unavailable", b"", b"Retry-After: 1.2.3\r\n")],
    "the answer is not HTTP/1.1": [b"SSH-2.0 OpenSSH_9\r\n"],
    "an event of unknown form": [SSE_HEAD, chunk("data: {]\n\n"), chunk("data: [DONE]\n\n"), LAST],
}


@pytest.mark.parametrize(
    "why", slow_except(BROKEN, "HTTP 429 queue_full", "the stream broke off", "an event of unknown form")
)
def test_a_failure_is_told_by_its_reason(why: str) -> None:
    records = drive(by(*BROKEN[why]), requests(3), max_concurrency=2)
    assert [record.error for record in records] == [why] * 3
    assert [record.retry_after for record in records] == [7.0 if "429" in why else None] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "event",
    [
        '{"choices": [{"text": ["one"], "finish_reason": null}]}',
        '{"choices": [], "usage": {"prompt_tokens": "many", "completion_tokens": 3}}',
        '{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": -1}}',
        '{"choices": [], "usage": {"completion_tokens": 1e308, "prompt_tokens_details": {"cached_tokens": "x"}}}',
    ],
)
def test_what_a_server_cannot_mean_fails_its_request_alone(event: str) -> None:
    pieces = [SSE_HEAD, chunk(STREAM[1]), chunk(f"data: {event}\n\n"), LAST]
    records = drive(by(*pieces), requests(2), max_concurrency=1)
    assert [record.error for record in records] == ["an event of unknown form"] * 2
    assert summarize(records)["failed"] == 2


def test_a_token_without_text_is_one_and_an_error_that_is_null_is_none() -> None:
    event = '{"choices": [{"index": 0, "text": null, "finish_reason": null}], "error": null}'
    (record,) = drive(by(SSE_HEAD, chunk(f"data: {event}\n\n"), chunk("data: [DONE]\n\n"), LAST), requests(1))
    assert (record.error, record.text, len(record.token_times)) == ("", "", 1)


def test_a_chunk_of_no_size_ends_an_answer() -> None:
    (record,) = drive(by(SSE_HEAD, chunk(STREAM[1]), b"-3\r\nabcdef\r\n", LAST), requests(1))
    assert record.error == "the stream broke off"


def test_a_silent_server_times_out() -> None:
    async def script(_body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield SSE_HEAD
        await asyncio.sleep(1)

    (record,) = drive(script, requests(1), timeout=0.2)
    assert record.error == "timed out"
    assert record.end_time - record.start_time >= 0.2


def test_a_connection_that_went_away_while_idle_is_replaced() -> None:
    with scripted(by(WHOLE, b"")) as server:  # it hangs up after each answer without having said so

        async def run() -> list[RequestRecord]:
            workload = [WorkloadRequest((Piece(f"{each}", 4),), 3, arrival=0.05 * each) for each in range(4)]
            return await Driver(ConnectionPool(server.url, {}), "/v1/completions", {}).run(workload)

        records = asyncio.run(run())
        assert [record.error for record in records] == [""] * 4
        assert server.connections >= 4


def test_nobody_there_is_said_at_once() -> None:
    async def run() -> None:
        await Driver(ConnectionPool("http://127.0.0.1:9", {}), "/v1/completions", {}).run(requests(1))

    with pytest.raises(SettingsError, match=r"No answer from 127\.0\.0\.1:9"):
        asyncio.run(run())


def test_at_most_so_many_are_under_way() -> None:
    running = most = 0

    async def script(_body: dict[str, Any]) -> AsyncIterator[bytes]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        yield WHOLE

    records = drive(script, requests(12), max_concurrency=3)
    assert most == 3
    assert not any(record.error for record in records)


def test_a_turn_is_sent_after_the_answer_before_and_the_time_to_think() -> None:
    workload = [
        WorkloadRequest(
            (Piece(f"{talk} {turn}", 4),), 3, arrival=None if turn else 0.0, conversation=talk, think_time=0.1
        )
        for talk in range(2)
        for turn in range(3)
    ]
    with scripted(by(WHOLE)) as server:

        async def run() -> list[RequestRecord]:
            return await Driver(ConnectionPool(server.url, {}), "/v1/chat/completions", {}).run(workload)

        records = asyncio.run(run())
        for earlier, later in ((records[0], records[1]), (records[1], records[2])):
            assert later.scheduled_time - earlier.end_time == pytest.approx(0.1, abs=1e-6)
            assert later.start_time >= later.scheduled_time - 0.002
        longest = max(server.bodies, key=lambda body: len(body["messages"]))["messages"]
        assert [message["role"] for message in longest] == ["user", "assistant"] * 2 + ["user"]
        assert longest[1]["content"] == " one two three"


def test_a_conversation_ends_with_its_first_failure() -> None:
    workload = [WorkloadRequest((Piece(f"{n}", 4),), 3, arrival=None if n else 0.0, conversation=0) for n in range(3)]
    records = drive(by(*BROKEN["HTTP 502"]), workload)
    assert [record.error for record in records] == ["HTTP 502", *["not sent: the previous turn failed"] * 2]


def test_the_client_tells_how_late_it_was() -> None:
    with scripted(by(WHOLE)) as server:

        async def run() -> Driver:
            driver = Driver(ConnectionPool(server.url, {}), "/v1/completions", {}, on_answer=lambda _: time.sleep(0.03))
            await driver.run([WorkloadRequest((Piece(f"{n}", 4),), 3, arrival=0.01 * n) for n in range(30)])
            return driver

        driver = asyncio.run(run())
        summary = driver.figures.summary()
        assert len(driver.figures.send_lags) == 30
        assert summary["p99_client_send_lag_ms"] > 20
        assert summary["p99_client_loop_lag_ms"] > 15
        assert summary["client_was_late"]


def test_tls_is_verified_unless_told_otherwise() -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(Path(__file__).with_name("self_signed.pem"))
    with scripted(by(WHOLE), tls=tls) as server:

        async def run(*, verify: bool) -> list[RequestRecord]:
            return await Driver(ConnectionPool(server.url, {}, verify=verify), "/v1/completions", {}).run(requests(2))

        assert [record.text for record in asyncio.run(run(verify=False))] == [" one two three"] * 2
        with pytest.raises(SettingsError, match="certificate"):
            asyncio.run(run(verify=True))
