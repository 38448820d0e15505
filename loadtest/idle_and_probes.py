"""What costs nothing should cost nothing: streams that wait, an engine that is idle, probes of a busy server.

    python -m loadtest.idle_and_probes [--engine thread|process] [--only probes,idle]

Starts Headrace with the dummy model of `loadtest.plumbing` and prints one line per figure.

- probes: /livez while 8 clients send prompts of 100,000 characters, each as soon as the last is answered, beside 16
  streams that decode.
- idle: resident memory of the server for each of 500 open streams that wait in the queue; whether 2,000 of them end
  well; the server's CPU time over five idle seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from app.workload.datasets import WORDS
from loadtest.plumbing import NAME, dummy_server, write_model
from loadtest.servers import Target

PROBE_SECONDS = 15.0
LONG_PROMPT = 100_000  # characters
CONTEXT = 131072


async def request(
    target: Target, method: str, path: str, body: dict[str, Any] | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request on a connection of its own, which ends with the answer."""
    host, port = target.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode() if body is not None else b""
    head = f"{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return reader, writer


async def answer_to(target: Target, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    """The whole answer, with its head."""
    reader, writer = await request(target, method, path, body)
    try:
        return await reader.read()
    finally:
        writer.close()


def stream(prompt: str, max_tokens: int) -> dict[str, Any]:
    greedy = {"temperature": 0, "ignore_eos": True, "stream": True}
    return {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, **greedy}


async def probes(target: Target) -> None:
    draw = random.Random(0)
    took: list[float] = []
    num_long = 0

    async def decode(number: int) -> None:
        while True:
            await answer_to(target, "POST", "/v1/completions", stream(f"stream {number}", 4000))

    async def send_long() -> None:
        nonlocal num_long
        while True:
            words = " ".join(draw.choices(WORDS, k=LONG_PROMPT // 5))[:LONG_PROMPT]
            answer = await answer_to(target, "POST", "/v1/completions", stream(words, 1))
            assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
            num_long += 1

    async with asyncio.TaskGroup() as tasks:
        busy = [tasks.create_task(decode(number)) for number in range(16)]
        await asyncio.sleep(1)
        busy += [tasks.create_task(send_long()) for _ in range(8)]
        await asyncio.sleep(1)
        end = time.monotonic() + PROBE_SECONDS
        while time.monotonic() < end:
            started = time.monotonic()
            answer = await answer_to(target, "GET", "/livez")
            took.append(time.monotonic() - started)
            assert answer.startswith(b"HTTP/1.1 200"), answer
            await asyncio.sleep(0.01)
        for task in busy:
            task.cancel()
    took.sort()
    print(
        f"/livez while 8 clients send {LONG_PROMPT:,} characters ({num_long} answered) and 16 decode, "
        f"{len(took)} times: p50 {took[len(took) // 2] * 1e3:.1f} ms, p99 {took[int(len(took) * 0.99)] * 1e3:.1f} ms"
    )


async def idle(target: Target) -> None:
    async with asyncio.TaskGroup() as tasks:
        hold = tasks.create_task(
            answer_to(target, "POST", "/v1/completions", stream("hold", 100_000))
        )  # the only running slot
        await asyncio.sleep(1)
        waiting: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        for goal in (100, 600, 2000):  # the first hundred pay for what is needed once
            rss, start = target.rss_mib(), len(waiting)
            while len(waiting) < goal:
                waiting.append(await request(target, "POST", "/v1/completions", stream("wait", 2)))
            await asyncio.gather(*(reader.readuntil(b"\r\n\r\n") for reader, _ in waiting[start:]))
            await asyncio.sleep(1)
            if goal == 600:
                kib = (target.rss_mib() - rss) * 1024 / (goal - start)
                print(f"500 open streams that wait: {kib:.1f} KiB of resident memory each")
        hold.cancel()
    started = time.monotonic()
    answers = await asyncio.gather(*(reader.read() for reader, _ in waiting))
    whole = sum(b"data: [DONE]" in answer for answer in answers)
    print(f"{len(waiting)} streams that waited: {whole} ended whole, within {time.monotonic() - started:.1f} s")
    for _, writer in waiting:
        writer.close()
    before = target.cpu_seconds()
    await asyncio.sleep(5)
    print(f"CPU time of the server in 5 s without work: {target.cpu_seconds() - before:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="thread")
    parser.add_argument("--only", default="probes,idle")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / NAME, max_position_embeddings=CONTEXT)
        for name in options.only.split(","):
            slots: dict[str, object] = {"max_num_seqs": 1} if name == "idle" else {}
            with dummy_server(model, options.engine, **slots) as target:
                asyncio.run({"probes": probes, "idle": idle}[name](target))


if __name__ == "__main__":
    main()
