"""Sends a workload to a server and records the answers, and how late the client itself was.

A request is sent at its time (open loop), or with a limit of concurrency when a slot is free (closed loop). A turn of a
conversation is sent its think time after the previous answer. A task that holds the event loop delays all others, so
bodies are made before the run, answers are parsed in small parts, and the garbage collector is off.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from time import perf_counter
from typing import Any

import orjson

from app.client import ConnectionPool, Exchange, read_answer
from app.runtime import no_collection
from app.workload.datasets import WorkloadRequest, text_of
from app.workload.report import RequestRecord, statistics

LOOP_TICK = 0.01  # seconds between two measurements of the event loop's lag
MAX_SEND_LAG_MS, MAX_LOOP_LAG_MS, MAX_CPU_SHARE = 10.0, 10.0, 0.9  # beyond these the client distorts the figures
TIMER = 0.001  # seconds: the resolution of uvloop's timers

Turn = tuple[WorkloadRequest, RequestRecord]


@dataclass
class ClientFigures:
    """The client's own delays in seconds."""

    began: float = 0.0  # when requests with arrival time 0 were due
    send_lags: list[float] = field(default_factory=list)  # of each request
    loop_lags: list[float] = field(default_factory=list)  # of the event loop, at each tick
    cpu_share: float = 0.0  # of one processor

    def summary(self) -> dict[str, Any]:
        """Return the client's part of the result. `client_was_late`: its delays may distort the figures."""
        figures = statistics("client_send_lag", self.send_lags) | statistics("client_loop_lag", self.loop_lags)
        late = (
            figures["p99_client_send_lag_ms"] > MAX_SEND_LAG_MS or figures["p99_client_loop_lag_ms"] > MAX_LOOP_LAG_MS
        )
        return figures | {"client_cpu_share": self.cpu_share, "client_was_late": late or self.cpu_share > MAX_CPU_SHARE}


class Driver:
    """One run; it cannot be used again. `fields` are part of every request's body."""

    def __init__(
        self,
        pool: ConnectionPool,
        path: str,
        fields: dict[str, Any],
        *,
        max_concurrency: int | None = None,
        id_prefix: str = "bench-",
        on_answer: Callable[[RequestRecord], None] = lambda _: None,
    ) -> None:
        self.figures = ClientFigures()
        self.stopped_by = 0  # the signal that ended the run early
        self._sending: asyncio.Task[None] | None = None
        self._pool = pool
        self._path = path
        self._fields = fields | {"stream": True, "stream_options": {"include_usage": True}}
        self._is_chat = path.endswith("/chat/completions")
        self._max_concurrency = max_concurrency
        self._id_prefix = id_prefix
        self._on_answer = on_answer
        self._slots: asyncio.Queue[float] = asyncio.Queue()  # the time since which each free slot is free
        self._to_read: asyncio.Queue[tuple[Exchange, RequestRecord, asyncio.Future[None]]] = asyncio.Queue()

    async def run(self, workload: Sequence[WorkloadRequest]) -> list[RequestRecord]:
        """Send everything and return a record of each request, in the order of the workload; after `stop`, of those
        that have ended.

        Raises SettingsError if the server does not accept connections.
        """
        turns = [(request, self._record(number, request)) for number, request in enumerate(workload)]
        talks = [list(talk) for _, talk in groupby(turns, key=_conversation)]
        bodies = [self._message(talk[0], []) for talk in talks]
        at_a_time = min(self._max_concurrency or len(talks), len(talks))
        closed = self._max_concurrency is not None or not workload[-1].arrival
        await self._pool.open(at_a_time if closed else 1)
        gc.collect()
        with no_collection():  # a collection would delay everything by milliseconds
            cpu, began = time.process_time(), perf_counter()
            self.figures.began = began
            for _ in range(self._max_concurrency or 0):
                self._slots.put_nowait(began)
            async with asyncio.TaskGroup() as helpers:
                own = [helpers.create_task(self._read_answers()), helpers.create_task(self._watch_loop())]
                self._sending = helpers.create_task(self._send_all(talks, bodies, began))
                await asyncio.wait([self._sending])
                for helper in own:
                    helper.cancel()
            self.figures.cpu_share = (time.process_time() - cpu) / (perf_counter() - began)
        return [record for _, record in turns if record.end_time or not self.stopped_by]

    def stop(self, signal: int) -> None:
        """End the run early, because of a signal. Requests in flight are given up."""
        self.stopped_by = signal
        if self._sending is not None:
            self._sending.cancel()

    async def _send_all(self, talks: Sequence[list[Turn]], bodies: Sequence[bytes], began: float) -> None:
        async with asyncio.TaskGroup() as group:
            for talk, body in zip(talks, bodies, strict=True):
                due = began + (talk[0][0].arrival or 0.0)
                # Sleep even if the request is late already, so that answers that have arrived are read first.
                await asyncio.sleep(max(0.0, due - perf_counter()))
                group.create_task(self._converse(talk, body, due))

    async def _converse(self, talk: list[Turn], body: bytes, due: float) -> None:
        said: list[str] = []
        for number, (request, record) in enumerate(talk):
            if number:
                due = talk[number - 1][1].end_time + request.think_time
                body = self._message(talk[number], said)
                await asyncio.sleep(max(0.0, due - perf_counter()))
            record.scheduled_time = due
            ready = max(due, await self._slots.get()) if self._max_concurrency else due
            exchange = await self._pool.exchange(body)
            if self._max_concurrency:
                self._slots.put_nowait(exchange.end_time)
            self.figures.send_lags.append(max(0.0, exchange.start_time - ready))
            read = asyncio.get_running_loop().create_future()
            self._to_read.put_nowait((exchange, record, read))
            await read
            self._on_answer(record)
            said += [text_of(request), record.text]
            if record.error:
                for _, later in talk[number + 1 :]:
                    later.mark_unsent(record.end_time)
                    self._on_answer(later)
                return

    def _record(self, number: int, request: WorkloadRequest) -> RequestRecord:
        return RequestRecord(0.0, request_id=f"{self._id_prefix}{number}", num_prompt_tokens=request.num_new_tokens)

    def _message(self, turn: Turn, said: list[str]) -> bytes:
        """Return the request of a turn; `said` are the earlier questions and answers in order."""
        request, record = turn
        texts = [*said, text_of(request)]
        if self._is_chat:
            roles = ("user", "assistant")
            messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
            own: dict[str, Any] = {"messages": messages, "max_completion_tokens": request.num_output_tokens}
        else:
            own = {"prompt": "\n".join(texts), "max_tokens": request.num_output_tokens}
        body = orjson.dumps(own | self._fields)
        return self._pool.message("POST", self._path, body, {"x-request-id": record.request_id})

    async def _read_answers(self) -> None:
        while True:
            exchange, record, read = await self._to_read.get()
            for _ in read_answer(exchange, record):
                await asyncio.sleep(0)
            read.set_result(None)

    async def _watch_loop(self) -> None:
        while True:
            due = perf_counter() + LOOP_TICK
            await asyncio.sleep(LOOP_TICK)
            self.figures.loop_lags.append(max(0.0, perf_counter() - due - TIMER))


def _conversation(turn: Turn) -> int | str:
    """Return the turn's conversation; a request without one is its own conversation."""
    request, record = turn
    return record.request_id if request.conversation is None else request.conversation
