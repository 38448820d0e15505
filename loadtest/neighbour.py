"""Measure the speed and the gaps of a server while other processes use the processor.

    python -m loadtest.neighbour                                         one and two threads, up to two neighbours
    python -m loadtest.neighbour --threads 2 --neighbours 0,1 --vllm VENV --llama EXECUTABLE

Serves 8 streams of the embedded model, alone and with neighbours: processes that compute and never wait, as a build
or another server does. Threads that share a loop make this hard: a step waits for the last of them, and one that the
operating system has put aside for a neighbour's time slice holds up all. With as many busy processes as cores, half
of the speed is what a fair system leaves.

Printed are output tokens per second, as they are and over those alone in the same round, gaps between tokens, and
the time of `/livez` (of peers `/health`), requested every 20 ms: the delay of the event loop.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from loadtest.peers import LLAMA, VLLM, make_server
from loadtest.servers import Server, headrace

STREAMS = 8
REQUESTS = 16
PROBE_SECONDS = 0.02  # between two probes
_BUSY = "while True: pass"

Figures = dict[str, Any]


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Run so many processes that compute all the time."""
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def probes(url: str) -> Iterator[list[float]]:
    """Seconds that each answer from `url` took, asked for one after the other while it lasts."""
    seconds: list[float] = []
    ended = threading.Event()

    def probe() -> None:
        while not ended.wait(PROBE_SECONDS):
            began = time.monotonic()
            with urllib.request.urlopen(url, timeout=60) as answer:
                answer.read()
            seconds.append(time.monotonic() - began)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield seconds
    finally:
        ended.set()
        thread.join()


def measure(server: Server, count: int, seed: int) -> Figures:
    """Run one load with `count` neighbours. Raises SystemExit if a request failed."""
    path = "/livez" if server.name.startswith("headrace") else "/health"
    server.resume()
    with neighbours(count), probes(server.target.url + path) as seconds:
        figures = server.target.measure(STREAMS, REQUESTS, seed, reconnect=True, prompt_words=128, max_tokens=128)
    server.pause()
    if figures["failed"]:
        raise SystemExit(f"{server.name}: requests failed: {figures['failed']}")
    return figures | {"probe_p99_ms": 1e3 * statistics.quantiles(seconds, n=100)[98]}


def table(seen: dict[tuple[str, int], list[Figures]]) -> str:
    """A line for each server and number of neighbours: medians of the rounds."""
    lines = [
        "| server | neighbours | tok/s | of alone | gap p50 / p99 ms | probe p99 ms |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (name, count), rounds in seen.items():
        speeds = [figures["tokens_per_second"] for figures in rounds]
        alone = [figures["tokens_per_second"] for figures in seen[name, min(n for at, n in seen if at == name)]]
        share = statistics.median(speed / first for speed, first in zip(speeds, alone, strict=True))
        gap, late = (statistics.median(figures["gap_ms"][share] for figures in rounds) for share in ("p50", "p99"))
        probe = statistics.median(figures["probe_p99_ms"] for figures in rounds)
        speed = f"{statistics.median(speeds):,.0f} | {share:.2f}"
        lines.append(f"| {name} | {count} | {speed} | {gap:.1f} / {late:.1f} | {probe:.0f} |")
    return "\n".join(lines)


def run(servers: Sequence[Server], counts: Sequence[int], rounds: int) -> dict[tuple[str, int], list[Figures]]:
    """Measure all servers in turn with every number of neighbours, `rounds` times; the others are stopped."""
    seen: dict[tuple[str, int], list[Figures]] = {}
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(server)
            server.pause()
        for number in range(-1, rounds):  # the first is a warm-up and does not count
            for server in servers:
                for count in counts if number >= 0 else counts[:1]:
                    figures = measure(server, count, 1000 + number)
                    if number >= 0:
                        seen.setdefault((server.name, count), []).append(figures)
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2", help="of Headrace, each a server of its own")
    parser.add_argument("--neighbours", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="the environment that vLLM is installed in")
    parser.add_argument("--llama", type=Path, metavar="EXECUTABLE", help="llama.cpp's llama-server")
    options = parser.parse_args()
    servers = [headrace(f"headrace, {count} threads", num_threads=count) for count in options.threads.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        places = {"vllm": options.vllm, "llama": options.llama}
        for name, place in ((VLLM, options.vllm), (LLAMA, options.llama)):
            if place:
                servers.append(make_server(name, **places, max_streams=STREAMS, scratch=Path(scratch)))
        print(table(run(servers, [int(count) for count in options.neighbours.split(",")], options.rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
