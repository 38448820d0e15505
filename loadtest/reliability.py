"""Measure a server in bad conditions: clients that leave, long prompts, floods, stalled readers, drain.

    python -m loadtest.reliability [--only abort,prefill,...] [--worker-class uvloop]

Starts its own servers (`headrace serve`, the embedded model, loopback only), prints one line per figure and ends by
itself within a few minutes. It measures what a client sees. Slots are free when /metrics says that nothing runs,
nothing waits and no KV block is owned.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import re
import signal
import socket
import statistics
import struct
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import orjson

from app.client import ConnectionPool, read_answer
from app.workload.datasets import WORDS
from app.workload.report import RequestRecord
from loadtest.servers import Target, headrace


def prompt_of(num_tokens: int, seed: int) -> str:
    """About this many tokens of text that no other seed shares: a plain English word is one or two tokens."""
    return " ".join(random.Random(seed).choices(WORDS, k=int(num_tokens / 1.08)))


def percentile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Client:
    """Asks one server. `ask` reads the answer; `open` leaves it to the caller, byte by byte."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._pool = ConnectionPool(target.url, {"connection": "close"})

    async def status(self, path: str) -> int:
        """The status of a GET; 0 without an answer."""
        return int((await self._pool.exchange(self._pool.message("GET", path))).head[9:12] or 0)

    async def busy(self) -> bool:
        exchange = await self._pool.exchange(self._pool.message("GET", "/metrics"))
        text = b"".join(data for data, _ in exchange.body()).decode()
        names = "num_requests_running|num_requests_waiting|kv_cache_usage_perc"
        return any(float(value) for value in re.findall(rf"^vllm:(?:{names})\{{[^}}]*\}} (\S+)$", text, re.MULTILINE))

    async def until_idle(self) -> float:
        """Seconds until nothing runs, waits or owns a block."""
        started = time.monotonic()
        while await self.busy():  # noqa: ASYNC110 - a server has to be polled
            await asyncio.sleep(0.002)
        return time.monotonic() - started

    async def ask(self, prompt: str, **fields: Any) -> RequestRecord:
        """A streamed completion, read to its end."""
        exchange = await self._pool.exchange(self._message(prompt, {"stream": True} | fields))
        record = RequestRecord(0.0)
        for _ in read_answer(exchange, record):
            pass
        return record

    async def open(self, prompt: str, *, receive_buffer: int | None = None, **fields: Any) -> socket.socket:
        """Send a completion and return its connection, from which nothing has been read."""
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        address = urlsplit(self.target.url)
        await asyncio.get_running_loop().sock_connect(sock, (address.hostname, address.port))
        await asyncio.get_running_loop().sock_sendall(sock, self._message(prompt, fields))
        return sock

    def _message(self, prompt: str, fields: dict[str, Any]) -> bytes:
        usual = {"model": self.target.model, "prompt": prompt, "temperature": 0, "ignore_eos": True}
        return self._pool.message("POST", "/v1/completions", orjson.dumps(usual | fields))


@asynccontextmanager
async def serving(**settings: object) -> AsyncIterator[Client]:
    with headrace("headrace", **settings) as target:
        yield Client(target)


def hang_up(sock: socket.socket, *, reset: bool = False) -> None:
    if reset:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    else:
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def report(what: str, result: str) -> None:
    print(f"{what:<74} {result}", flush=True)


# --- the cases


async def abort(worker: dict[str, str]) -> None:
    """Client gone → slots free, in 24 cases; and the next request after a client has left a long prefill."""
    times: dict[tuple[str, ...], float] = {}
    async with serving(max_num_seqs=8, **worker) as server:
        await server.ask("warm up", max_tokens=8)
        phases = ("decoding", "prefilling", "queued")
        for number, case in enumerate(itertools.product(phases, (True, False), ("FIN", "RST"), (1, 4))):
            phase, stream, how, n = case
            others = []
            if phase == "queued":
                others = [await server.open(f"hold {i}", max_tokens=400, stream=True) for i in range(8)]
                await asyncio.sleep(0.5)
            size = 1800 if phase == "prefilling" else 20
            victim = await server.open(prompt_of(size, number), max_tokens=300, stream=stream, n=n)
            await asyncio.sleep({"decoding": 0.6, "prefilling": 0.15, "queued": 0.2}[phase])
            for connection in [*others, victim]:
                hang_up(connection, reset=how == "RST")
            times[(phase, "stream" if stream else "whole", how, f"n={n}")] = await server.until_idle()
        worst = max(times, key=lambda case: times[case])
        report(
            "client gone → slots free, worst and median of 24 cases",
            f"{times[worst] * 1e3:.0f} ms ({', '.join(worst)}), {statistics.median(times.values()) * 1e3:.0f} ms",
        )

        waits = []
        for number in range(5):
            victim = await server.open(prompt_of(1800, 100 + number), max_tokens=50, stream=True)
            await asyncio.sleep(0.15)
            hang_up(victim)
            waits.append((await server.ask(f"a short question, number {number}", max_tokens=4)).ttft)
        report(
            "TTFT of the next request after a client left a 1,800-token prefill, 5 times",
            f"median {statistics.median(waits) * 1e3:.0f} ms, worst {max(waits) * 1e3:.0f} ms",
        )


async def kills(worker: dict[str, str]) -> None:
    """300 random kills and 20 greedy survivors, float32: nothing leaks and no text changes."""
    async with serving(dtype="float32", max_num_seqs=32, **worker) as server:
        prompts = [f"Tell me about {word}, number {i}." for i, word in enumerate((WORDS * 2)[:20])]

        async def text(prompt: str) -> str:
            return (await server.ask(prompt, max_tokens=40)).text

        solo = [await text(prompt) for prompt in prompts]
        draw = random.Random(7)

        async def victim(number: int) -> None:
            size = draw.choice([10, 60, 300])
            connection = await server.open(prompt_of(size, number % 40), max_tokens=200, stream=draw.random() < 0.7)
            await asyncio.sleep(draw.uniform(0, 0.4))
            hang_up(connection, reset=draw.random() < 0.5)

        async def killer() -> None:
            for batch in range(30):
                await asyncio.gather(*(victim(batch * 10 + i) for i in range(10)))

        survivors = asyncio.gather(*(text(prompt) for prompt in prompts))
        await killer()
        changed = sum(before != after for before, after in zip(solo, await survivors, strict=True))
        await server.until_idle()
        changed_after = sum([before != await text(prompt) for before, prompt in zip(solo, prompts, strict=True)])
        report(
            "300 random kills: texts changed among 20 survivors, and among 20 repeats; leaked",
            f"{changed}, {changed_after}; 0 (idle again)",
        )


async def prefill(worker: dict[str, str]) -> None:
    """A decoding stream while an 1,800-token prompt arrives: speed kept, longest gap."""
    kept, gaps = [], []
    async with serving(**worker) as server:
        for number in range(5):
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(server.ask("Count slowly.", max_tokens=150))
                await asyncio.sleep(1.0)
                long = await server.ask(prompt_of(1800, 200 + number), max_tokens=1)
            times, arrival, first = reading.result().token_times, long.start_time, long.token_times[0]
            solo = [b - a for a, b in itertools.pairwise(times) if b < arrival][2:]
            during = [b - a for a, b in itertools.pairwise(times) if b > arrival and a < first]
            kept.append(statistics.mean(solo) / statistics.mean(during))
            gaps.append(max(during))
        report(
            "a decoding stream while an 1,800-token prompt arrives, 5 times: speed kept",
            f"median {statistics.median(kept):.0%}, worst {min(kept):.0%}",
        )
        report("  its longest gap", f"median {statistics.median(gaps) * 1e3:.0f} ms, worst {max(gaps) * 1e3:.0f} ms")


async def probes(worker: dict[str, str]) -> None:
    """/health while 8 long prompts arrive and 8 streams decode."""
    async with serving(**worker) as server:
        took = []
        async with asyncio.TaskGroup() as tasks:
            for number in range(8):
                tasks.create_task(server.ask(f"stream {number}", max_tokens=300))
            await asyncio.sleep(1)
            longs = [tasks.create_task(server.ask(prompt_of(1800, 300 + i), max_tokens=1)) for i in range(8)]
            while not all(long.done() for long in longs):
                started = time.monotonic()
                assert await server.status("/health") == 200
                took.append(time.monotonic() - started)
                await asyncio.sleep(0.01)
        report(
            f"/health while 8 long prompts arrive beside 8 streams, {len(took)} times",
            f"p50 {percentile(took, 0.5) * 1e3:.1f} ms, p99 {percentile(took, 0.99) * 1e3:.1f} ms",
        )


async def overload(worker: dict[str, str]) -> None:
    """200 clients at once on 8 running slots with a queue of 40 places."""
    async with serving(max_num_seqs=8, max_queued_requests=40, **worker) as server:
        records = await asyncio.gather(*(server.ask(f"client {number}", max_tokens=16) for number in range(200)))
        refused = [record.end_time - record.start_time for record in records if record.status == 429]
        first = [record.ttft for record in records if record.token_times]
        report(
            "200 clients at once on 8 running slots, 40 places: refused; refusal p50 / p99",
            f"{len(refused)}; {percentile(refused, 0.5) * 1e3:.0f} / {percentile(refused, 0.99) * 1e3:.0f} ms",
        )
        report("  TTFT p50 / p99 of the rest", f"{percentile(first, 0.5):.2f} / {percentile(first, 0.99):.2f} s")


async def stalled(worker: dict[str, str]) -> None:
    """50 readers that stop reading and one that reads."""
    async with serving(max_num_seqs=64, send_timeout=3, **worker) as server:
        readers = [
            await server.open(f"reader {i}", receive_buffer=4096, max_tokens=4000, stream=True, logprobs=20)
            for i in range(50)
        ]
        await asyncio.sleep(1)
        started = time.monotonic()
        healthy = await server.ask("a client that reads", max_tokens=60)
        freed = started
        while time.monotonic() - started < 90 and await server.busy():
            await asyncio.sleep(0.1)
            freed = time.monotonic()
        report(
            "50 readers that stop reading (send_timeout 3 s): all cut, slots free after",
            f"{freed - started:.1f} s{' (NOT all)' if await server.busy() else ''}",
        )
        report(
            "  a client that reads",
            f"{len(healthy.token_times)} chunks, longest gap {max(healthy.itls) * 1e3:.0f} ms, "
            f"{healthy.error or 'ended whole'}",
        )
        for reader in readers:
            hang_up(reader, reset=True)


async def drain(worker: dict[str, str]) -> None:
    """SIGTERM under 10 streams."""
    async with serving(**worker) as server:
        reading = asyncio.gather(*(server.ask(f"stream {i}", max_tokens=120) for i in range(10)))
        await asyncio.sleep(1)
        assert server.target.pid is not None
        os.kill(server.target.pid, signal.SIGTERM)
        started = time.monotonic()
        await asyncio.sleep(0.05)
        ready = await server.status("/readyz")
        whole = sum(not record.error for record in await reading)
        report(
            "SIGTERM under 10 streams: ended whole; after; /readyz until then",
            f"{whole}; {time.monotonic() - started:.1f} s; {ready}",
        )


CASES: dict[str, Callable[[dict[str, str]], Coroutine[Any, Any, None]]] = {
    case.__name__: case for case in (abort, kills, prefill, probes, overload, stalled, drain)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help=f"cases, comma separated; of: {', '.join(CASES)}")
    parser.add_argument("--worker-class", default="uvloop", choices=["asyncio", "uvloop", "trio"])
    arguments = parser.parse_args()
    for name in arguments.only.split(","):
        asyncio.run(CASES[name]({"worker_class": arguments.worker_class}))


if __name__ == "__main__":
    main()
