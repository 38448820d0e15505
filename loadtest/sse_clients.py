"""Closed-loop streaming clients that cost next to nothing, for measuring a server that shares its cores with them.

    python -m loadtest.sse_clients URL --streams 64 --requests 512

Each of `--streams` connections sends a request, reads its stream to the end and sends the next, until `--requests` have
been answered in all. Prints one JSON object of figures. `loadtest.plumbing` runs this in a process of its own, so that
the two sides of the socket share no interpreter lock and their CPU time can be told apart.

A chunk's bytes are looked at for three things only: how many events they end, `[DONE]`, and the usage in the last ones.
Text is not decoded. So a client costs a few microseconds per chunk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import resource
import sys
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import uvloop

from app.workload.datasets import WORDS

_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
_PROMPT_USAGE = re.compile(rb'"prompt_tokens": ?(\d+)')
_TAIL = 2048  # bytes at the end of a stream that hold its last events


@dataclass
class Figures:
    """What all streams saw. Times are seconds."""

    num_tokens: int = 0
    prompt_tokens: list[int] = field(default_factory=list)  # of each request
    num_chunks: int = 0  # events with text, as far as clients can tell them apart: all but `[DONE]`
    failed: dict[str, int] = field(default_factory=dict)
    ttft: list[float] = field(default_factory=list)
    first_ttft: list[float] = field(default_factory=list)  # of each stream's first request: they arrive together
    gaps: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)


class Stream(asyncio.Protocol):
    """One connection: request after request, as long as `work` gives any; or a single one if `reconnect`."""

    def __init__(self, host: str, work: Work, *, reconnect: bool, is_first: bool) -> None:
        self._host = host
        self._work = work
        self._reconnect = reconnect
        self._is_first = is_first
        self._tail = b""
        self._head_read = False
        self._num_sent = 0
        self._started = self._last = 0.0
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:  # uvloop's transports are no asyncio.Transport
        self._transport: asyncio.Transport = transport

    def start(self) -> None:
        """Send the first request."""
        self._send()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._head_read:
            self._tail += data
            if b"\r\n\r\n" not in self._tail:
                return
            head, _, data = self._tail.partition(b"\r\n\r\n")
            self._head_read, self._tail = True, b""
            if not head.startswith(b"HTTP/1.1 200"):
                self._fail(head.split(b"\r\n", 1)[0].decode())
                return
        num_events = data.count(b"data: {")
        figures = self._work.figures
        if num_events:
            figures.num_chunks += num_events
            if self._last:
                figures.gaps.append(now - self._last)
            else:
                figures.ttft.append(now - self._started)
                if self._is_first and self._num_sent == 1:
                    figures.first_ttft.append(now - self._started)
            self._last = now
        self._tail = (self._tail + data)[-_TAIL:]
        if self._tail.endswith(b"0\r\n\r\n") and b"data: [DONE]" in self._tail:
            usage = _USAGE.findall(self._tail)
            if not usage or b'"error"' in self._tail:
                self._fail("a stream without usage or with an error")
                return
            figures.num_tokens += int(usage[-1])
            figures.prompt_tokens += map(int, _PROMPT_USAGE.findall(self._tail)[-1:])
            figures.latencies.append(now - self._started)
            self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self._fail("connection lost")

    def _send(self) -> None:
        body = None if self._reconnect and self._num_sent else self._work.next_body()
        if body is None:
            self.done.set_result(None)
            self._transport.close()
            return
        self._num_sent += 1
        self._started, self._last = time.perf_counter(), 0.0
        self._head_read, self._tail = False, b""
        self._transport.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % (self._host.encode(), len(body))
            + body
        )

    def _fail(self, why: str) -> None:
        failed = self._work.figures.failed
        failed[why] = failed.get(why, 0) + 1
        self.done.set_result(None)
        self._transport.abort()


class Work:
    """The requests still to be sent. No two prompts of a run begin alike, so that no prefix cache helps."""

    def __init__(self, num_requests: int, prompt_words: int, max_tokens: int, model: str, seed: int) -> None:
        self.figures = Figures()
        self.num_left = num_requests
        self._draw = random.Random(seed)
        self._prompt_words = prompt_words
        self._body = {
            "model": model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def next_body(self) -> bytes | None:
        if self.num_left == 0:
            return None
        self.num_left -= 1
        prompt = " ".join(self._draw.choices(WORDS, k=self._prompt_words))
        return json.dumps(self._body | {"prompt": prompt}).encode()


async def load(url: str, num_streams: int, work: Work, *, reconnect: bool = False) -> dict[str, object]:
    """Run the work over `num_streams` connections and return its figures. With `reconnect` every request gets a
    connection of its own, because some servers close a connection after each stream."""
    target = urlsplit(url)
    loop = asyncio.get_running_loop()
    started, cpu = time.perf_counter(), time.process_time()
    host = target.hostname
    assert host is not None, url

    async def connect(*, is_first: bool) -> Stream:
        _, stream = await loop.create_connection(
            lambda: Stream(target.netloc, work, reconnect=reconnect, is_first=is_first),
            host,
            target.port or 80,
        )
        return stream

    async def run(stream: Stream) -> None:
        stream.start()
        await stream.done
        while reconnect and work.num_left and not work.figures.failed:
            stream = await connect(is_first=False)
            stream.start()
            await stream.done

    streams = [await connect(is_first=True) for _ in range(num_streams)]
    await asyncio.gather(*map(run, streams))
    figures = work.figures
    seconds = time.perf_counter() - started
    return {
        "tokens": figures.num_tokens,
        "requests": len(figures.latencies),
        "prompt_tokens": sum(figures.prompt_tokens),
        "shortest_prompt": min(figures.prompt_tokens, default=0),
        "longest_prompt": max(figures.prompt_tokens, default=0),
        "failed": figures.failed,
        "seconds": seconds,
        "tokens_per_second": figures.num_tokens / seconds,
        "tokens_per_chunk": figures.num_tokens / max(figures.num_chunks, 1),
        "ttft_ms": _percentiles(figures.ttft),
        "first_ttft_ms": _percentiles(figures.first_ttft),
        "gap_ms": _percentiles(figures.gaps),
        "latency_ms": _percentiles(figures.latencies),
        "client_cpu_seconds": time.process_time() - cpu,
    }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds) or [0.0]
    return {
        f"p{share}": 1e3 * ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 95, 99)
    } | {"max": 1e3 * ordered[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="where the server is: http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-words", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reconnect", action="store_true", help="a connection for each request")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    work = Work(options.requests, options.prompt_words, options.max_tokens, options.model, options.seed)
    json.dump(uvloop.run(load(options.url, options.streams, work, reconnect=options.reconnect)), sys.stdout)


if __name__ == "__main__":
    main()
