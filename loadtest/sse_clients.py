"""Closed-loop streaming clients that cost next to nothing, for measuring a server that shares its cores with them.

    python -m loadtest.sse_clients URL --model NAME --streams 64 --requests 512

Each of `--streams` clients sends a request, reads its stream to the end and sends the next, until `--requests` have
been answered in all. Prints one JSON object of figures. `loadtest.plumbing` runs this in a process of its own, so that
server and clients share no interpreter lock and their CPU time is separate.

Streams are read by `app.client`. Of the bytes only three things are looked at: how many events each read ends,
`[DONE]`, and the usage in the last ones. Text is not decoded, so a client costs a few microseconds per read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import uvloop

from app.client import ConnectionPool, Exchange, allow_open_files
from app.workload.datasets import WORDS

_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
_PROMPT_USAGE = re.compile(rb'"prompt_tokens": ?(\d+)')
_TAIL = 2048  # bytes at the end of a stream that hold its last events


@dataclass
class Figures:
    """The figures of all clients. Times are seconds."""

    num_tokens: int = 0
    prompt_tokens: list[int] = field(default_factory=list)  # of each request
    num_chunks: int = 0  # all events but `[DONE]`
    failed: Counter[str] = field(default_factory=Counter)
    ttft: list[float] = field(default_factory=list)
    first_ttft: list[float] = field(default_factory=list)  # of each client's first request: they arrive together
    gaps: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    def add(self, exchange: Exchange, *, is_first: bool) -> bool:
        """Count one answer. Return False if it failed."""
        tail = b"".join(exchange.reads[-8:])[-_TAIL:]
        usage = _USAGE.findall(tail)
        if not exchange.head.startswith(b"HTTP/1.1 200"):
            self.failed[exchange.error or exchange.head.split(b"\r\n", 1)[0].decode()] += 1
            return False
        if exchange.error or not usage or b'"error"' in tail or b"data: [DONE]" not in tail:
            self.failed[exchange.error or "a stream without usage or with an error"] += 1
            return False
        last = exchange.start_time
        for data, moment in zip(exchange.reads, exchange.times, strict=True):
            if num_events := data.count(b"data: {"):
                self.num_chunks += num_events
                (self.gaps if last > exchange.start_time else self.ttft).append(moment - last)
                last = moment
        self.first_ttft += self.ttft[-1:] if is_first else []
        self.num_tokens += int(usage[-1])
        self.prompt_tokens += map(int, _PROMPT_USAGE.findall(tail)[-1:])
        self.latencies.append(exchange.end_time - exchange.start_time)
        return True


class Work:
    """The requests still to be sent. No two prompts of a run begin alike, so that no prefix cache helps."""

    def __init__(self, num_requests: int, prompt_words: int, max_tokens: int, model: str, seed: int) -> None:
        self.figures = Figures()
        self._num_left = num_requests
        self._draw = random.Random(seed)
        self._prompt_words = prompt_words
        self._body = {"model": model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        self._body |= {"stream": True, "stream_options": {"include_usage": True}}

    def next_body(self) -> bytes | None:
        if self._num_left == 0:
            return None
        self._num_left -= 1
        prompt = " ".join(self._draw.choices(WORDS, k=self._prompt_words))
        return json.dumps(self._body | {"prompt": prompt}).encode()


async def load(url: str, num_streams: int, work: Work, *, reconnect: bool = False) -> dict[str, object]:
    """Run the work with `num_streams` clients and return its figures. With `reconnect` every request gets a connection
    of its own, because some servers close a connection after each stream. A client ends at its first failure."""
    pool = ConnectionPool(url, {"connection": "close"} if reconnect else {})

    async def client() -> None:
        is_first = True
        while body := work.next_body():
            exchange = await pool.exchange(pool.message("POST", "/v1/completions", body))
            if not work.figures.add(exchange, is_first=is_first):
                return
            is_first = False

    started, cpu = time.perf_counter(), time.process_time()
    await pool.open(num_streams)
    await asyncio.gather(*(client() for _ in range(num_streams)))
    seconds = time.perf_counter() - started
    pool.close()
    figures = work.figures
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
    ranks = {f"p{share}": min(len(ordered) - 1, len(ordered) * share // 100) for share in (50, 95, 99)}
    return {name: 1e3 * ordered[rank] for name, rank in ranks.items()} | {"max": 1e3 * ordered[-1]}


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
    allow_open_files()
    work = Work(options.requests, options.prompt_words, options.max_tokens, options.model, options.seed)
    json.dump(uvloop.run(load(options.url, options.streams, work, reconnect=options.reconnect)), sys.stdout)


if __name__ == "__main__":
    main()
