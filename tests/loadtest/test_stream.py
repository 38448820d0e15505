"""The load test's instrument against a server that sends exactly what a script says."""

import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from loadtest.figures import HEADER, Figures, percentile
from loadtest.stream import Refused, StreamBroken, Target, Timeline, first_model, stream_chat

Script = Callable[[socket.socket], None]

EVENT_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ROLE = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
FINISH = {"delta": {}, "finish_reason": "length"}
USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}
DONE = b"data: [DONE]\n\n"


def text(piece: str) -> bytes:
    return event({"choices": [{"delta": {"content": piece}, "finish_reason": None}]})


def event(data: dict) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def chunk(*data: bytes) -> bytes:
    body = b"".join(data)
    return b"%x\r\n%b\r\n" % (len(body), body)


def answer(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


OPENING = EVENT_STREAM + chunk(event({"choices": [ROLE]}))
ENDING = chunk(event({"choices": [FINISH]})) + chunk(event(USAGE), DONE) + b"0\r\n\r\n"


@pytest.fixture
def serve() -> Iterator[Callable[[Script | bytes], Target]]:
    """Answers one connection by a script, or with these bytes, and then closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads = []

        def start(script: Script | bytes) -> Target:
            def answer_one() -> None:
                connection, _ = listener.accept()
                with connection:
                    request = b""
                    while b"\r\n\r\n" not in request:
                        request += connection.recv(65536)
                    head, _, body = request.partition(b"\r\n\r\n")
                    length = next((int(h[15:]) for h in head.split(b"\r\n") if h.startswith(b"Content-Length:")), 0)
                    while len(body) < length:
                        body += connection.recv(65536)
                    if isinstance(script, bytes):
                        connection.sendall(script)
                    else:
                        script(connection)

            threads.append(threading.Thread(target=answer_one, daemon=True))
            threads[-1].start()
            return Target(host=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=30.0)

        yield start
        for thread in threads:
            thread.join(30.0)
            assert not thread.is_alive()


def test_every_piece_has_the_time_at_which_it_arrived(serve, monkeypatch):
    """The server sends the next piece only after the client has looked at its clock: a client that waits for more to
    come, to fill a buffer or a line, would wait for ever."""
    ticks, looked = itertools.count(), threading.Semaphore(0)

    def clock() -> float:
        looked.release()
        return float(next(ticks))

    monkeypatch.setattr(time, "perf_counter", clock)

    def script(connection: socket.socket) -> None:
        looked.acquire()  # the start
        for data in (
            OPENING,
            chunk(text("a")),
            chunk(b": keep-alive\n\n"),
            chunk(text("b"), text("c")),
            chunk(text("d")),
        ):
            connection.sendall(data)
            looked.acquire()
        connection.sendall(ENDING)

    timeline = stream_chat(serve(script), {"messages": []})
    assert timeline.arrivals == [2.0, 4.0, 4.0, 5.0]
    assert timeline.ttft == 2.0
    assert timeline.gaps == [2.0, 0.0, 1.0]
    assert timeline.tokens_per_second == (5 - 1) / 3.0
    assert (timeline.num_prompt_tokens, timeline.num_tokens, timeline.finish_reason) == (7, 5, "length")
    assert timeline.ended > timeline.arrivals[-1]
    assert not timeline.left


def test_events_are_found_however_their_bytes_are_cut(serve):
    whole = event({"choices": [ROLE]}) + text("é🌊") + text("b") + event({"choices": [FINISH]}) + event(USAGE) + DONE
    cut = EVENT_STREAM + b"".join(chunk(whole[i : i + 1]) for i in range(len(whole))) + b"0\r\n\r\n"
    timeline = stream_chat(serve(cut), {})
    assert (len(timeline.arrivals), timeline.num_tokens, timeline.num_bytes) == (2, 5, len(whole))


def test_a_user_who_leaves_hangs_up_at_once(serve):
    gone = threading.Event()

    def script(connection: socket.socket) -> None:
        connection.sendall(OPENING + chunk(text("a")) + chunk(text("b")) + chunk(text("c")))
        while connection.recv(65536):
            pass
        gone.set()

    timeline = stream_chat(serve(script), {}, leave_after=2)
    assert timeline.left
    assert len(timeline.arrivals) == 2
    assert gone.wait(30.0)


@pytest.mark.parametrize(
    ("answered", "message", "retry_after"),
    [
        (
            answer("429 Too Many Requests", b'{"error": {"code": "queue_full"}}', "Retry-After: 3"),
            "HTTP 429 queue_full",
            3.0,
        ),
        (answer("503 Service Unavailable", b'{"error": {"type": "overloaded"}}'), "HTTP 503 overloaded", None),
        (answer("502 Bad Gateway", b"<html>nginx</html>"), "HTTP 502", None),
        (answer("401 Unauthorized", b'{"error": "Unauthorized"}', "Retry-After: soon"), "HTTP 401", None),
    ],
)
def test_a_refusal_is_told_by_status_code_and_retry_after(serve, answered, message, retry_after):
    with pytest.raises(Refused) as refused:
        stream_chat(serve(answered), {})
    assert (str(refused.value), refused.value.retry_after) == (message, retry_after)


@pytest.mark.parametrize(
    ("rest", "error", "message"),
    [
        (
            chunk(event({"error": {"code": "engine_dead"}}), DONE) + b"0\r\n\r\n",
            StreamBroken,
            "error frame engine_dead",
        ),
        (b"0\r\n\r\n", StreamBroken, "without"),
        (b"", http.client.IncompleteRead, "bytes read"),
        (b"ff\r\ndata: {", http.client.IncompleteRead, "bytes read"),
        (chunk(event(USAGE), DONE) + b"0\r\n\r\n", StreamBroken, "no finish_reason"),
        (chunk(b"data: {]\n\n"), ValueError, "line 1 column 2"),
    ],
    ids=["error frame", "no DONE", "cut between chunks", "cut in a chunk", "no finish reason", "not JSON"],
)
def test_a_stream_that_does_not_end_well_is_a_failure(serve, rest, error, message):
    with pytest.raises(error, match=message):
        stream_chat(serve(OPENING + chunk(text("a")) + rest), {})


def test_a_server_that_falls_silent_is_a_failure(serve):
    let_go = threading.Event()

    def script(connection: socket.socket) -> None:
        connection.sendall(OPENING)
        let_go.wait(30.0)

    target = Target(host=serve(script).host, timeout=0.05)
    with pytest.raises(TimeoutError):
        stream_chat(target, {})
    let_go.set()


def test_the_first_model_that_is_served_is_asked_for(serve):
    assert first_model(serve(answer("200 OK", b'{"data": [{"id": "a"}, {"id": "b"}]}'))) == "a"
    with pytest.raises(LookupError):
        first_model(serve(answer("200 OK", b'{"data": []}')))


def test_percentiles_are_values_that_occurred():
    values = [float(i) for i in range(1, 101)]
    assert [percentile(values, p) for p in (0, 1, 50, 95, 99, 100)] == [1.0, 1.0, 50.0, 95.0, 99.0, 100.0]
    assert percentile([3.0], 99) == 3.0
    assert percentile([2.0, 1.0], 50) == 1.0


def test_a_row_has_a_cell_for_every_heading():
    figures = Figures(max_users=2)
    assert figures.row() == "no request has finished; 0 failed, 0 left"
    figures.add(Timeline(started=0.0, arrivals=[1.0, 1.5, 2.5], ended=3.0, num_prompt_tokens=9, num_tokens=3))
    figures.add(Timeline(started=1.0, arrivals=[2.0], ended=2.0, left=True))
    figures.failures["HTTP 429 queue_full"] += 1
    headings, cells = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in (HEADER.splitlines()[0], figures.row())
    )
    assert dict(zip(headings, cells, strict=True)) == {
        "users": "2",
        "requests": "1",
        "failed": "1",
        "left": "1",
        "prompt tokens": "9 to 9",
        "output tok/s": "1.3",  # four tokens in three seconds
        "TTFT p50 / p95 ms": "1000 / 1000",
        "ITL p50 / p95 / p99 ms": "500.0 / 1000.0 / 1000.0",
        "tok/s per stream p50": "1.3",
        "end to end p50 / p95 s": "3.0 / 3.0",
    }
