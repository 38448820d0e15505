"""How the scope holds under fire, in figures: clients that leave, long prompts, floods, stalled readers, drain.

    python loadtest/reliability.py [--only abort,prefill,...] [--worker-class uvloop]

Starts its own servers (`headrace serve`, the embedded model, loopback only), drives them with raw sockets, prints one
line per figure and ends by itself within a few minutes. What is measured is what a client sees; slots are free when
/metrics says that nothing runs, nothing waits and no KV block is owned.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import socket
import statistics
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

WORDS = [
    "river",
    "stone",
    "lantern",
    "bridge",
    "orchard",
    "winter",
    "harbor",
    "signal",
    "copper",
    "meadow",
    "thunder",
    "glass",
]
ROOT = Path(__file__).resolve().parent.parent


def prompt_of(num_tokens: int, seed: int) -> str:
    """About this many tokens of text that no other seed shares: a plain English word is one or two tokens."""
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(int(num_tokens / 1.08)))


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Server:
    """A server process of its own, on a free port."""

    def __init__(self, **settings: object) -> None:
        self.port = _free_port()
        self.environment = {f"HEADRACE_{name.upper()}": str(value) for name, value in settings.items()}

    async def __aenter__(self) -> Server:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "app.commands.cli", "serve", "--port", str(self.port), "--log-level", "error",
            env=os.environ | self.environment, cwd=ROOT, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        started = time.monotonic()
        while time.monotonic() - started < 60:
            with contextlib.suppress(OSError):
                if (await self.get("/readyz"))[0] == 200:
                    return self
            await asyncio.sleep(0.1)
        raise TimeoutError("the server did not become ready")

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.terminate()
            await asyncio.wait_for(self.process.wait(), 60)

    async def connect(self, receive_buffer: int | None = None) -> Connection:
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=sock)
        return Connection(reader, writer)

    async def get(self, path: str) -> tuple[int, bytes]:
        connection = await self.connect()
        connection.send("GET", path, b"")
        try:
            return await connection.response()
        finally:
            connection.close()

    async def busy(self) -> bool:
        text = (await self.get("/metrics"))[1].decode()
        names = "num_requests_running|num_requests_waiting|kv_cache_usage_perc"
        return any(float(value) for value in re.findall(rf"^vllm:(?:{names})\{{[^}}]*\}} (\S+)$", text, re.MULTILINE))

    async def until_idle(self) -> float:
        """Seconds until nothing runs, waits or owns a block."""
        started = time.monotonic()
        while await self.busy():  # noqa: ASYNC110 - nothing but asking tells
            await asyncio.sleep(0.002)
        return time.monotonic() - started

    async def chat(self, content: str, receive_buffer: int | None = None, **fields: Any) -> Connection:
        """Send a chat completion; the answer is for the caller to read."""
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "ignore_eos": True} | fields
        connection = await self.connect(receive_buffer)
        connection.send("POST", "/v1/chat/completions", json.dumps(body).encode())
        return connection


class Connection:
    """One request on one socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, method: str, path: str, body: bytes) -> None:
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
        self.started = time.monotonic()
        self.writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        return int(lines[0].split()[1]), dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)

    async def response(self) -> tuple[int, bytes]:
        status, headers = await self.head()
        return status, await self.reader.readexactly(int(headers["content-length"]))

    async def events(self) -> AsyncIterator[tuple[float, str]]:
        """When each event came, and its data. Comments are passed over."""
        while line := await self.reader.readline():
            if line.startswith(b"data: "):
                yield time.monotonic(), line[6:].decode().strip()

    async def stream(self) -> tuple[list[float], str, str]:
        """Times of the text chunks, the text, and the last event."""
        times: list[float] = []
        text, last = "", ""
        async for when, data in self.events():
            last = data
            if data != "[DONE]":
                for choice in json.loads(data).get("choices", ()):
                    piece = choice["delta"].get("content")
                    if piece or choice.get("logprobs"):
                        times.append(when)
                        text += piece or ""
        return times, text, last

    def close(self, *, reset: bool = False) -> None:
        if reset:
            sock = self.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.close()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def report(what: str, result: str) -> None:
    print(f"{what:<74} {result}", flush=True)


# --- the cases


async def abort(worker: dict[str, str]) -> None:
    """Client gone → slots free, in 24 cases; and the next request after a client has left a long prefill."""
    times: dict[tuple[str, ...], float] = {}
    async with Server(max_num_seqs=8, **worker) as server:
        await (await server.chat("warm up", max_tokens=8)).response()
        phases = ("decoding", "prefilling", "queued")
        for number, case in enumerate(itertools.product(phases, (True, False), ("FIN", "RST"), (1, 4))):
            phase, stream, how, n = case
            others = []
            if phase == "queued":
                others = [await server.chat(f"hold {i}", max_tokens=400, stream=True) for i in range(8)]
                await asyncio.sleep(0.5)
            size = 1800 if phase == "prefilling" else 20
            victim = await server.chat(prompt_of(size, number), max_tokens=300, stream=stream, n=n)
            await asyncio.sleep({"decoding": 0.6, "prefilling": 0.15, "queued": 0.2}[phase])
            for connection in [*others, victim]:
                connection.close(reset=how == "RST")
            times[(phase, "stream" if stream else "whole", how, f"n={n}")] = await server.until_idle()
        worst = max(times, key=lambda case: times[case])
        report(
            "client gone → slots free, worst and median of 24 cases",
            f"{times[worst] * 1e3:.0f} ms ({', '.join(worst)}), {statistics.median(times.values()) * 1e3:.0f} ms",
        )

        waits = []
        for number in range(5):
            victim = await server.chat(prompt_of(1800, 100 + number), max_tokens=50, stream=True)
            await asyncio.sleep(0.15)
            victim.close()
            following = await server.chat(f"a short question, number {number}", max_tokens=4, stream=True)
            chunks, _, _ = await following.stream()
            waits.append(chunks[0] - following.started)
        report(
            "TTFT of the next request after a client left a 1,800-token prefill, 5 times",
            f"median {statistics.median(waits) * 1e3:.0f} ms, worst {max(waits) * 1e3:.0f} ms",
        )


async def kills(worker: dict[str, str]) -> None:
    """300 random kills beside 20 greedy survivors, float32: nothing leaks and no text changes."""
    async with Server(dtype="float32", max_num_seqs=32, **worker) as server:
        prompts = [f"Tell me about {word}, number {i}." for i, word in enumerate((WORDS * 2)[:20])]

        async def text(prompt: str) -> str:
            return (await (await server.chat(prompt, max_tokens=40, stream=True)).stream())[1]

        solo = [await text(prompt) for prompt in prompts]
        draw = random.Random(7)

        async def victim(number: int) -> None:
            size = draw.choice([10, 60, 300])
            connection = await server.chat(prompt_of(size, number % 40), max_tokens=200, stream=draw.random() < 0.7)
            await asyncio.sleep(draw.uniform(0, 0.4))
            connection.close(reset=draw.random() < 0.5)

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
    async with Server(**worker) as server:
        for number in range(5):
            # With logprobs every token is an event, also one that shows nothing.
            stream = await server.chat("Count slowly.", max_tokens=150, stream=True, logprobs=True)
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(stream.stream())
                await asyncio.sleep(1.0)
                arrival = time.monotonic()
                long = await server.chat(prompt_of(1800, 200 + number), max_tokens=1, stream=True)
                long_times, _, _ = await long.stream()
            times, _, _ = reading.result()
            solo = [b - a for a, b in itertools.pairwise(times) if b < arrival][2:]
            during = [b - a for a, b in itertools.pairwise(times) if b > arrival and a < long_times[0]]
            kept.append(statistics.mean(solo) / statistics.mean(during))
            gaps.append(max(during))
        report(
            "a decoding stream while an 1,800-token prompt arrives, 5 times: speed kept",
            f"median {statistics.median(kept):.0%}, worst {min(kept):.0%}",
        )
        report("  its longest gap", f"median {statistics.median(gaps) * 1e3:.0f} ms, worst {max(gaps) * 1e3:.0f} ms")


async def probes(worker: dict[str, str]) -> None:
    """/health while 8 long prompts arrive beside 8 streams."""
    async with Server(**worker) as server:
        streams = [await server.chat(f"stream {i}", max_tokens=300, stream=True) for i in range(8)]
        took = []
        async with asyncio.TaskGroup() as tasks:
            for stream in streams:
                tasks.create_task(stream.stream())
            await asyncio.sleep(1)
            longs = [await server.chat(prompt_of(1800, 300 + i), max_tokens=1, stream=True) for i in range(8)]
            done = asyncio.gather(*(long.stream() for long in longs))
            while not done.done():
                started = time.monotonic()
                status, _ = await server.get("/health")
                assert status == 200
                took.append(time.monotonic() - started)
                await asyncio.sleep(0.01)
        report(
            f"/health while 8 long prompts arrive beside 8 streams, {len(took)} times",
            f"p50 {percentile(took, 0.5) * 1e3:.1f} ms, p99 {percentile(took, 0.99) * 1e3:.1f} ms",
        )


async def overload(worker: dict[str, str]) -> None:
    """200 clients at once on 8 running slots with a queue of 40 places."""
    async with Server(max_num_seqs=8, max_queued_requests=40, **worker) as server:
        refused: list[float] = []
        first: list[float] = []

        async def client(number: int) -> None:
            connection = await server.chat(f"client {number}", max_tokens=16, stream=True)
            status, _ = await connection.head()
            if status == 429:
                refused.append(time.monotonic() - connection.started)
            else:
                first.append((await connection.stream())[0][0] - connection.started)
            connection.close()

        await asyncio.gather(*(client(number) for number in range(200)))
        report(
            "200 clients at once on 8 running slots, 40 places: refused; refusal p50 / p99",
            f"{len(refused)}; {percentile(refused, 0.5) * 1e3:.0f} / {percentile(refused, 0.99) * 1e3:.0f} ms",
        )
        report("  TTFT p50 / p99 of the rest", f"{percentile(first, 0.5):.2f} / {percentile(first, 0.99):.2f} s")


async def stalled(worker: dict[str, str]) -> None:
    """50 readers that stop reading beside one that reads."""
    async with Server(max_num_seqs=64, send_timeout=3, **worker) as server:
        readers = [
            await server.chat(f"reader {i}", receive_buffer=4096, max_tokens=4000, stream=True, logprobs=True,
                              top_logprobs=20)
            for i in range(50)
        ]  # fmt: skip
        await asyncio.sleep(1)
        started = time.monotonic()
        healthy = await server.chat("the one who reads", max_tokens=60, stream=True)
        times, _, last = await healthy.stream()
        freed = started
        while time.monotonic() - started < 90 and await server.busy():
            await asyncio.sleep(0.1)
            freed = time.monotonic()
        report(
            "50 readers that stop reading (send_timeout 3 s): all cut, slots free after",
            f"{freed - started:.1f} s{' (NOT all)' if await server.busy() else ''}",
        )
        report(
            "  the one who reads",
            f"{len(times)} chunks, longest gap "
            f"{max(b - a for a, b in itertools.pairwise(times)) * 1e3:.0f} ms, ended with {last}",
        )
        for reader in readers:
            reader.close()


async def drain(worker: dict[str, str]) -> None:
    """SIGTERM under 10 streams."""
    async with Server(**worker) as server:
        streams = [await server.chat(f"stream {i}", max_tokens=120, stream=True) for i in range(10)]
        reading = asyncio.gather(*(stream.stream() for stream in streams))
        await asyncio.sleep(1)
        server.process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        await asyncio.sleep(0.05)
        ready, _ = await server.get("/readyz")
        ends = [last for _, _, last in await reading]
        code = await asyncio.wait_for(server.process.wait(), 60)
        report(
            "SIGTERM under 10 streams: ended whole; exit code; after; /readyz meanwhile",
            f"{ends.count('[DONE]')}; {code}; {time.monotonic() - started:.1f} s; {ready}",
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
