"""Measure the cost of waiting streams, of an idle engine, and of probes of a busy server.

    python -m loadtest.idle_and_probes [--engine thread|process] [--only probes,idle]

Starts Headrace with the dummy model of `loadtest.plumbing` and prints one line per figure.

- probes: /livez while 8 clients send prompts of 100,000 characters, each as soon as the last is answered, while 16
  streams decode.
- idle: resident memory of the server for each of 500 open streams that wait in the queue; whether 2,000 of them end
  well; the server's CPU time over five idle seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import tempfile
import time
from pathlib import Path

from app.client import ConnectionPool, Exchange, allow_open_files
from app.workload.datasets import WORDS
from loadtest.plumbing import NAME, dummy_server, write_model
from loadtest.servers import Target

PROBE_SECONDS = 15.0
LONG_PROMPT = 100_000  # characters
CONTEXT = 131072


async def answer_to(pool: ConnectionPool, prompt: str, max_tokens: int) -> Exchange:
    """A streamed completion, read to its end."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    return await pool.exchange(pool.message("POST", "/v1/completions", json.dumps(body).encode()))


async def probes(target: Target) -> None:
    pool = ConnectionPool(target.url, {"connection": "close"})
    draw = random.Random(0)
    took: list[float] = []
    num_long = 0

    async def decode(number: int) -> None:
        while True:
            await answer_to(pool, f"stream {number}", 4000)

    async def send_long() -> None:
        nonlocal num_long
        while True:
            words = " ".join(draw.choices(WORDS, k=LONG_PROMPT // 5))[:LONG_PROMPT]
            answer = await answer_to(pool, words, 1)
            assert answer.head.startswith(b"HTTP/1.1 200"), answer.head
            num_long += 1

    async with asyncio.TaskGroup() as tasks:
        busy = [tasks.create_task(decode(number)) for number in range(16)]
        await asyncio.sleep(1)
        busy += [tasks.create_task(send_long()) for _ in range(8)]
        await asyncio.sleep(1)
        end = time.monotonic() + PROBE_SECONDS
        while time.monotonic() < end:
            started = time.monotonic()
            answer = await pool.exchange(pool.message("GET", "/livez"))
            took.append(time.monotonic() - started)
            assert answer.head.startswith(b"HTTP/1.1 200"), answer.head
            await asyncio.sleep(0.01)
        for task in busy:
            task.cancel()
    took.sort()
    print(
        f"/livez while 8 clients send {LONG_PROMPT:,} characters ({num_long} answered) and 16 decode, "
        f"{len(took)} times: p50 {took[len(took) // 2] * 1e3:.1f} ms, p99 {took[int(len(took) * 0.99)] * 1e3:.1f} ms"
    )


async def num_waiting(pool: ConnectionPool) -> float:
    exchange = await pool.exchange(pool.message("GET", "/metrics"))
    metrics = b"".join(data for data, _ in exchange.body())
    return float(re.findall(rb"^vllm:num_requests_waiting\{[^}]*\} (\S+)$", metrics, re.MULTILINE)[0])


async def idle(target: Target) -> None:
    pool = ConnectionPool(target.url, {"connection": "close"})
    async with asyncio.TaskGroup() as tasks:
        hold = tasks.create_task(answer_to(pool, "hold", 100_000))  # the only running slot
        await asyncio.sleep(1)
        waiting: list[asyncio.Task[Exchange]] = []
        for goal in (100, 600, 2000):  # the first hundred pay for what is needed once
            rss, start = target.rss_mib(), len(waiting)
            waiting += [tasks.create_task(answer_to(pool, "wait", 2)) for _ in range(start, goal)]
            while await num_waiting(pool) + sum(map(asyncio.Task.done, waiting)) < goal:  # noqa: ASYNC110
                await asyncio.sleep(0.5)
            await asyncio.sleep(1)
            if goal == 600:
                kib = (target.rss_mib() - rss) * 1024 / (goal - start)
                print(f"500 open streams that wait: {kib:.1f} KiB of resident memory each")
        hold.cancel()
        started = time.monotonic()
    whole = sum(b"data: [DONE]" in b"".join(task.result().reads) for task in waiting)
    print(f"{len(waiting)} streams that waited: {whole} ended whole, within {time.monotonic() - started:.1f} s")
    before = target.cpu_seconds()
    await asyncio.sleep(5)
    print(f"CPU time of the server in 5 s without work: {target.cpu_seconds() - before:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="thread")
    parser.add_argument("--only", default="probes,idle")
    options = parser.parse_args()
    allow_open_files()
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / NAME, max_position_embeddings=CONTEXT)
        for name in options.only.split(","):
            slots: dict[str, object] = {"max_num_seqs": 1, "max_queue_time": 3600} if name == "idle" else {}
            with dummy_server(model, options.engine, **slots) as target:
                asyncio.run({"probes": probes, "idle": idle}[name](target))


if __name__ == "__main__":
    main()
