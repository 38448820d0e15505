"""A client that leaves, in whatever phase and manner, leaves nothing turning and nobody disturbed.

The full matrix runs on one event loop and a cross-section on the others. Each case has a neighbour, a stream that goes
on beside the victim and must not notice. The victim would run for thousands of tokens, so what ends early is aborted.
"""

from __future__ import annotations

import itertools
import random
import socket
import time
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest

from tests.selection import slow_except
from tests.support.harness import Metrics, Server
from tests.support.raw_client import RawClient, sse_events
from tests.support.tiny_model import tiny_server
from tests.support.victims import LONG, PATH, SHORT, endless

SLOTS = 5  # of `narrow_server`
LONG_PROMPT = 1500  # tokens: 47 steps
NEIGHBOUR_PROMPT = "A headrace is a channel that"

Phase = Callable[[Server, Metrics, int], None]


class Neighbour:
    """A greedy stream of `n` equal choices that runs until its block is left. Its text is known from a solo run."""

    _solo_texts: ClassVar[dict[Server, str]] = {}

    def __init__(self, server: Server, n: int) -> None:
        self._server = server
        self._n = n
        self._client = server.connect()
        self.text = ""

    def __enter__(self) -> Neighbour:
        body = {"prompt": NEIGHBOUR_PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": 2000, "n": self._n}
        self._client.post("/v1/completions", {**body, "stream": True})
        assert self._client.read_head().status_code == 200
        self._events = sse_events(self._client.chunks())
        # From here on it decodes: whatever prompt tokens are counted are not its own.
        silent = set(range(self._n))
        while silent:
            silent.discard(self._next_piece())
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._client.leave_with_rst()

    def read(self, count: int) -> None:
        """Go on until `count` more pieces of the first choice have come."""
        while count:
            count -= self._next_piece() == 0

    def _next_piece(self) -> int:
        [choice] = next(self._events)["choices"]
        if choice["index"] == 0:
            self.text += choice["text"]
        return choice["index"]

    def check_text(self) -> None:
        """What was read is what a client reads who has the server to himself. Call it when nothing else runs."""
        solo, max_tokens = self._solo_texts.get(self._server, ""), 24
        while len(solo) < len(self.text):
            solo = self._server.complete(NEIGHBOUR_PROMPT, max_tokens=max_tokens, ignore_eos=True)["choices"][0]["text"]
            self._solo_texts[self._server] = solo
            max_tokens *= 2
        assert solo.startswith(self.text)


# --- phases: each waits until the victim, of `n` choices, is there; `start` is how things stood before it came


def queued(server: Server, start: Metrics, n: int) -> None:
    server.wait_until(lambda now: now.waiting == n)


def prefilling(server: Server, start: Metrics, n: int) -> None:
    server.wait_until(lambda now: now.computed_tokens > start.computed_tokens)


def decoding(server: Server, start: Metrics, n: int) -> None:
    # Who ran before may have ended: that the victim is there is told by its prompt, which no other begins with.
    there = start.computed_tokens + SHORT
    now = server.wait_until(lambda now: now.computed_tokens >= there and now.running >= n)
    server.wait_until(lambda later: later.generation_tokens > now.generation_tokens + 2 * now.running)


def just_sent(server: Server, start: Metrics, n: int) -> None:
    """Leave before the server can have said anything, or even looked."""


PHASES: dict[str, Phase] = {"queued": queued, "prefilling": prefilling, "decoding": decoding, "just_sent": just_sent}
LEAVING = {"fin": RawClient.leave_with_fin, "rst": RawClient.leave_with_rst}

_ALL = list(itertools.product(PHASES, [True, False], LEAVING, [1, 4]))
_CROSS_SECTION = [  # every phase streamed and not; every other value in several phases
    ("queued", True, "rst", 4),
    ("queued", False, "fin", 1),
    ("prefilling", True, "fin", 1),
    ("prefilling", False, "rst", 4),
    ("decoding", True, "fin", 4),
    ("decoding", False, "rst", 1),
    ("just_sent", True, "rst", 1),
    ("just_sent", False, "fin", 4),
]


def case_name(value: object) -> str:
    return {True: "stream", False: "whole"}[value] if isinstance(value, bool) else str(value)


@pytest.mark.parametrize(("phase", "stream", "how", "n"), slow_except(_ALL, *_CROSS_SECTION), ids=case_name)
@pytest.mark.parametrize("narrow_server", ["uvloop"], indirect=True, scope="session")
def test_client_gone_is_aborted_and_nobody_else_notices(
    narrow_server: Server, phase: str, stream: bool, how: str, n: int
) -> None:
    check_client_gone(narrow_server, phase, stream, how, n)


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "stream", "how", "n"), _CROSS_SECTION, ids=case_name)
@pytest.mark.parametrize("narrow_server", slow_except(["asyncio", "trio"], "trio"), indirect=True, scope="session")
def test_client_gone_is_aborted_on_every_event_loop(
    narrow_server: Server, phase: str, stream: bool, how: str, n: int
) -> None:
    check_client_gone(narrow_server, phase, stream, how, n)


def check_client_gone(server: Server, phase: str, stream: bool, how: str, n: int) -> None:
    before = server.wait_idle()

    with Neighbour(server, n=SLOTS if phase == "queued" else 1) as neighbour:
        start = server.metrics()
        victim = server.connect()
        prompt = _fresh_prompt(LONG_PROMPT if phase == "prefilling" else 20)
        victim.post(
            "/v1/completions",
            {"prompt": prompt, "max_tokens": 2000, "ignore_eos": True, "temperature": 0, "n": n, "stream": stream},
        )
        PHASES[phase](server, start, n)
        if stream and phase == "decoding":
            _read_text(victim)
        LEAVING[how](victim)

        if phase == "just_sent" and how == "rst":
            # A reset may overtake its request, which is then never seen, or seen when all else is over.
            with server.connect() as later:
                later.get("/livez")
                later.read_head()
            expected = range(before.aborted, before.aborted + 2)
        else:
            server.wait_until(lambda now: now.aborted > before.aborted)
            expected = range(before.aborted + 1, before.aborted + 2)  # one request, one abort, whatever its n
        end = server.wait_until(lambda now: now.waiting == 0 and now.running == start.running)
        assert end.aborted in expected
        if phase == "queued":
            assert end.computed_tokens == start.computed_tokens, "a client gone while queued is never prefilled"
        if phase == "prefilling":
            assert end.computed_tokens - start.computed_tokens < LONG_PROMPT, "its prefill is not finished either"
        neighbour.read(2)

    after = server.wait_idle()
    assert after.aborted - 1 in expected  # the neighbour's own
    assert after.finished["error"] == 0
    neighbour.check_text()


def check_client_gone_behind(
    connect: Callable[[], RawClient], server: Server, phase: str, stream: bool, how: str, long: int = LONG
) -> None:
    """The same for clients that `connect` to a proxy in front of the server; `long` is a prompt's length in tokens."""
    n = 4 if stream == (how == "fin") else 1
    before = server.wait_idle()
    with server.connect() as crowd:
        if phase == "queued":
            crowd.post(PATH, endless(stream=True, n=SLOTS))
            server.wait_until(lambda now: now.running == SLOTS)
        start = server.metrics()
        victim = connect()
        victim.post(PATH, endless(long if phase == "prefilling" else SHORT, stream=stream, n=n))
        PHASES[phase](server, start, n)
        LEAVING[how](victim)
        if phase == "just_sent":  # the proxy may not have come to asking the server
            with connect() as later:
                later.get("/livez")
                later.read_head()
        else:
            server.wait_until(lambda now: now.aborted > before.aborted)
        end = server.wait_until(lambda now: now.waiting == 0 and now.running == start.running)
        if phase == "queued":
            assert end.computed_tokens == start.computed_tokens, "a client gone while queued is never prefilled"
    after = server.wait_idle()
    if phase == "prefilling":
        assert after.computed_tokens - start.computed_tokens < long
    gone = after.aborted - before.aborted - (phase == "queued")
    assert gone == 1 or (phase == "just_sent" and gone == 0)
    assert after.finished["error"] == 0


@pytest.mark.parametrize(
    "narrow_server", slow_except(["uvloop", "asyncio", "trio"], "uvloop"), indirect=True, scope="session"
)
class TestOtherWaysToLeave:
    def test_client_gone_within_its_body_never_reaches_the_engine(self, narrow_server: Server) -> None:
        before = narrow_server.wait_idle()
        with narrow_server.connect() as client:
            client.send_bytes(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
                b"content-type: application/json\r\ncontent-length: 1000\r\n\r\n{"
            )
            client.leave_with_fin()
        after = narrow_server.wait_until(
            lambda now: now.http_requests("/v1/completions", "4xx") > before.http_requests("/v1/completions", "4xx")
        )
        assert after.finished == before.finished

    def test_many_clients_gone_at_once_leave_the_server_clean(self, narrow_server: Server) -> None:
        before = narrow_server.wait_idle()
        clients = [narrow_server.connect() for _ in range(40)]
        for number, client in enumerate(clients):
            body = {"prompt": _fresh_prompt(40), "max_tokens": 2000, "ignore_eos": True, "stream": number % 2 == 0}
            client.post("/v1/completions", body)
        narrow_server.wait_until(lambda now: now.running + now.waiting == len(clients))
        for number, client in enumerate(clients):
            (client.leave_with_fin if number % 3 else client.leave_with_rst)()
        after = narrow_server.wait_until(lambda now: now.aborted == before.aborted + len(clients))
        after = narrow_server.wait_idle()
        assert after.finished == before.finished | {"abort": before.aborted + len(clients)}
        assert narrow_server.complete("The sea", max_tokens=1)["usage"]["completion_tokens"] == 1


_numbers: Iterator[int] = itertools.count()


def _fresh_prompt(num_tokens: int) -> list[int]:
    """Token ids that no other request begins with, so that the prefix cache knows none of them."""
    generator = random.Random(next(_numbers))
    return [generator.randrange(1000, 40000) for _ in range(num_tokens)]


def _read_text(client: RawClient) -> None:
    assert client.read_head().status_code == 200
    for event in sse_events(client.chunks()):
        assert isinstance(event, dict)
        if event["choices"][0]["text"]:
            return


@pytest.mark.slow
@pytest.mark.parametrize("worker_class", ["uvloop", "asyncio"])
def test_a_client_that_leaves_while_its_answer_is_sent_leaves_no_traceback(worker_class: str) -> None:
    """The task of the connection and that of the answer then wait for the same close, and the second is cancelled."""
    draw = random.Random(0)
    with tiny_server(worker_class) as server:
        address = server.wait_ready().client.base_url
        for _ in range(400):
            with socket.create_connection((address.host, address.port or 80)) as client:
                client.sendall(b"GET /api/tags HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                time.sleep(draw.random() * 0.01)
                client.shutdown(socket.SHUT_WR)
        assert server.client.get("/health").status_code == 200
        assert "Traceback" not in server.log
