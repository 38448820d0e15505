"""Clients that keep a fleet busy while its size changes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

from tests.support.harness import Server
from tests.support.raw_client import sse_events

PATH = "/v1/completions"


def num_streamed(server: Server, first: int, num_tokens: int) -> int:
    """Tokens of a stream, which has to end whole."""
    options = {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    with server.connect() as client:
        client.post(PATH, {"prompt": [first] * 20, "max_tokens": num_tokens, **options})
        assert client.read_head().status_code == 200
        *_, last, done = sse_events(client.chunks())
    assert done == "[DONE]"
    found: int = last["usage"]["completion_tokens"]
    return found


@contextmanager
def keep_busy(server: Server, size: int) -> Iterator[None]:
    """So many clients ask again and again as long as the block lasts, and get whole answers."""
    is_over = Event()

    def talk(number: int) -> None:
        while not is_over.is_set():
            answer = server.complete([number] * 20, max_tokens=200, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == 200

    with ThreadPoolExecutor(size) as clients:
        talks: list[Future[None]] = [clients.submit(talk, number) for number in range(size)]
        try:
            yield
        finally:
            is_over.set()
        for each in talks:
            each.result()
