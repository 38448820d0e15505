"""Clients that ask without a pause and remember what became of each request, for servers that come and go meanwhile."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

import h11

from tests.integration.chaos.harness import prompt_of
from tests.support.harness import TIMEOUT, Server
from tests.support.raw_client import RawClient, sse_events

WHOLE = "whole"


@dataclass
class Outcome:
    """Of one request: how it ended, its text, and how many bytes of the answer had come."""

    ended: str = "asked"
    text: str = ""
    pieces: int = 0


@dataclass
class Load:
    """A context manager: clients, each a thread, ask at `port` from entering to leaving. Half of them keep their
    connection for as long as the server does, the others make a new one for each request."""

    port: int
    name: str
    num_clients: int = 8
    max_tokens: int = 20
    path: str = "/v1/completions"
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    connects: Counter[str] = field(default_factory=Counter)

    def __enter__(self) -> Self:
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(self.num_clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(TIMEOUT)

    @property
    def num_whole(self) -> int:
        """Requests that were answered whole."""
        return sum(outcome.ended == WHOLE for outcome in list(self.outcomes.values()))

    def wait_for_more(self, count: int) -> None:
        """Until so many more have been answered whole."""
        wanted, deadline = self.num_whole + count, time.monotonic() + TIMEOUT
        while self.num_whole < wanted:
            assert time.monotonic() < deadline, Counter(outcome.ended for outcome in list(self.outcomes.values()))
            time.sleep(0.01)

    def broken(self) -> dict[str, Outcome]:
        """Those that were not."""
        return {request_id: outcome for request_id, outcome in self.outcomes.items() if outcome.ended != WHOLE}

    def _client(self, number: int) -> None:
        keeps = number % 2 == 0
        connection: RawClient | None = None
        count = 0
        while not self._ending.is_set():
            request_id = f"{self.name}-{number}-{count}"
            count += 1
            outcome = self.outcomes[request_id] = Outcome()
            try:
                if connection is None:
                    connection = RawClient("127.0.0.1", self.port, timeout=TIMEOUT)
                    self.connects["made"] += 1
                may_go_on = self._ask(connection, request_id, outcome)
            except (OSError, h11.ProtocolError, StopIteration, AssertionError) as error:
                outcome.ended = repr(error)
                may_go_on = False
            if connection is not None and not (keeps and may_go_on):
                with suppress(OSError):
                    connection.leave_with_fin()
                connection = None
        if connection is not None:
            connection.leave_with_fin()

    def _ask(self, connection: RawClient, request_id: str, outcome: Outcome) -> bool:
        """Returns whether the connection takes another request."""
        body = {"prompt": prompt_of(request_id), "max_tokens": self.max_tokens, "temperature": 0}
        connection.post(self.path, body | {"stream": True, "ignore_eos": True}, {"x-request-id": request_id})
        head = connection.read_head()
        if head.status_code != 200:
            outcome.ended = f"{head.status_code} {connection.read_body().decode()}"
            return False
        for event in sse_events(connection.chunks()):
            if event == "[DONE]":
                outcome.ended = WHOLE
            elif "error" in event:
                outcome.ended = json.dumps(event["error"])
            else:
                outcome.pieces += 1
                outcome.text += "".join(choice["text"] for choice in event["choices"])
        if (b"connection", b"close") in head.headers:
            return False
        connection.next_exchange()
        return True


def times_served(servers: Collection[Server], at_least: Collection[str]) -> Counter[str]:
    """How often each request was served, by the servers' logs: a line for each, a moment after it has ended, however
    it has. Waits for those of these ids."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        lines = [json.loads(line) for server in servers for line in server.log.splitlines() if line.startswith("{")]
        served = Counter(line["request_id"] for line in lines if "request_id" in line)
        if served.keys() >= set(at_least):
            return served
        assert time.monotonic() < deadline, set(at_least) - served.keys()
        time.sleep(0.1)
