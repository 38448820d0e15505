"""Compare the speed of Headrace, vLLM and llama.cpp on the embedded model, in one run on one machine.

    python -m loadtest.compare --vllm VENV --llama EXECUTABLE                  all three, 15 minutes at most
    python -m loadtest.compare --vllm VENV --llama EXECUTABLE --quick          one round, about 4 minutes
    python -m loadtest.compare --servers headrace,llama.cpp --llama EXECUTABLE --streams 1,8 --json FILE

Starts each server, measures it and ends it. All are started before the first measure, and those that are not being
measured are stopped (SIGSTOP), so that they can take turns within a round and yet have the machine to themselves. Every
server gets the same prompts: 128 words that are 128 tokens, no two alike, so that no prefix cache helps; greedy, 128
tokens of output, ended by nothing else. Clients are those of `loadtest.sse_clients`: closed loop, SSE over HTTP.

tok/s are output tokens over the time of a whole measure. TTFT is of the first request of each stream: these arrive
together. Prefill is prompts of 480 tokens with one token of output, one after the other. Start is from exec to the
first answer that says ready; servers that start fast do it three times, and the median counts. A ratio is taken within
each round; the median of them is printed, and their range.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from loadtest.peers import HEADRACE, LLAMA, VLLM, make_server
from loadtest.servers import Server

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 128
PREFILL_TOKENS = 480
PREFILL_REQUESTS = 8
REQUESTS = {1: 4, 8: 16, 32: 64}  # per measure
FAST_START = 10.0  # seconds to ready, below which a start is repeated
STARTS = 3

Figures = dict[str, Any]  # what `Target.measure` gives


@dataclass
class Record:
    """The measurements of one server."""

    starts: list[float] = field(default_factory=list)  # seconds from exec to ready
    answers: list[float] = field(default_factory=list)  # seconds from exec to the first answer of any kind
    streams: dict[int, list[Figures]] = field(default_factory=dict)  # by their number, one for each round
    prefill: list[Figures] = field(default_factory=list)


@dataclass(frozen=True)
class Ratio:
    """A line of the table of ratios: which values are divided, and what is wanted of the quotient."""

    label: str
    values: Callable[[Record], Sequence[float]]  # one for each round
    targets: dict[str, float]  # by peer
    at_least: bool = True

    def of(self, ours: Record, theirs: Record, peer: str) -> tuple[str, str]:
        """The target in words, and what was seen."""
        pairs = list(zip(self.values(ours), self.values(theirs), strict=False))
        target = self.targets[peer]
        wanted = f"{'≥' if self.at_least else '≤'} {target:.3g}×"
        if not pairs:
            return wanted, "not measured"
        ratios = sorted(a / b for a, b in pairs if b)
        seen = statistics.median(ratios)
        met = seen >= target if self.at_least else seen <= target
        return wanted, f"{seen:.2f}× ({ratios[0]:.2f} to {ratios[-1]:.2f}){'' if met else ': missed'}"


def _speed(num_streams: int) -> Callable[[Record], Sequence[float]]:
    return lambda record: [figures["tokens_per_second"] for figures in record.streams.get(num_streams, ())]


def _ttft(num_streams: int) -> Callable[[Record], Sequence[float]]:
    return lambda record: [figures["first_ttft_ms"]["p50"] for figures in record.streams.get(num_streams, ())]


def _prefill(record: Record) -> list[float]:
    return [figures["prompt_tokens"] / figures["seconds"] for figures in record.prefill]


RATIOS = (
    Ratio("1 stream, tok/s", _speed(1), {VLLM: 6.0, LLAMA: 1.5}),
    Ratio("8 streams, tok/s", _speed(8), {VLLM: 3.0, LLAMA: 4.0}),
    Ratio("32 streams, tok/s", _speed(32), {VLLM: 2.5, LLAMA: 5.0}),
    Ratio("prefill, tok/s", _prefill, {VLLM: 2.0, LLAMA: 5.0}),
    Ratio("TTFT p50, 8 streams arriving together", _ttft(8), {VLLM: 0.4, LLAMA: 0.12}, at_least=False),
    Ratio(
        "start to ready", lambda record: [statistics.median(record.starts)], {VLLM: 1 / 20, LLAMA: 2.0}, at_least=False
    ),
)


class Comparison:
    """Servers that take turns."""

    def __init__(self, servers: Sequence[Server], *, num_starts: int = STARTS) -> None:
        self._servers = servers
        self._num_starts = num_starts
        self.records = {server.name: Record() for server in servers}
        self._began = time.monotonic()

    def run(self, streams: Sequence[int], num_rounds: int, *, scale: float = 1.0, prefill: bool = True) -> None:
        """Start, measure in turns, end. Raises SystemExit if anything failed: then no figure counts."""
        with ExitStack() as stack:
            for server in self._servers:
                self._start(server, stack)
            for number in range(num_rounds):
                for server in self._servers:
                    server.resume()
                    for num_streams in streams:
                        self._decode(server, num_streams, number, scale)
                    if prefill:
                        self._prefill(server, number, scale)
                    server.pause()

    def _start(self, server: Server, stack: ExitStack) -> None:
        record = self.records[server.name]
        while True:
            server.__enter__()
            record.starts.append(server.seconds_to_ready)
            record.answers.append(server.seconds_to_answer)
            if server.seconds_to_ready > FAST_START or len(record.starts) == self._num_starts:
                break
            server.__exit__()
        stack.push(server)
        self._say(f"{server.name} ready after {', '.join(f'{seconds:.2f}' for seconds in record.starts)} s")
        self._load(server, 8, 16, 1, PROMPT_TOKENS, 16)  # a warm-up; does not count
        server.pause()

    def _decode(self, server: Server, num_streams: int, number: int, scale: float) -> None:
        num_requests = max(num_streams, int(scale * REQUESTS.get(num_streams, 2 * num_streams)))
        figures = self._load(
            server, num_streams, num_requests, _seed(number, num_streams), PROMPT_TOKENS, OUTPUT_TOKENS
        )
        self.records[server.name].streams.setdefault(num_streams, []).append(figures)
        self._say(
            f"round {number + 1}, {server.name}, {num_streams} streams: {figures['tokens_per_second']:.0f} tok/s, "
            f"TTFT {figures['first_ttft_ms']['p50']:.0f} ms"
        )

    def _prefill(self, server: Server, number: int, scale: float) -> None:
        num_requests = max(2, int(scale * PREFILL_REQUESTS))
        figures = self._load(server, 1, num_requests, _seed(number, 0), PREFILL_TOKENS, 1)
        self.records[server.name].prefill.append(figures)
        self._say(f"round {number + 1}, {server.name}, prefill: {_prefill(self.records[server.name])[-1]:.0f} tok/s")

    def _load(
        self, server: Server, num_streams: int, num_requests: int, seed: int, prompt: int, output: int
    ) -> Figures:
        figures = server.target.measure(
            num_streams, num_requests, seed, reconnect=True, prompt_words=prompt, max_tokens=output
        )
        if figures["failed"]:
            raise SystemExit(f"{server.name}: requests failed: {figures['failed']}")
        if (figures["shortest_prompt"], figures["longest_prompt"]) != (prompt, prompt):
            raise SystemExit(
                f"{server.name} counted {figures['shortest_prompt']} to {figures['longest_prompt']} tokens in prompts "
                f"of {prompt}"
            )
        if figures["tokens"] != num_requests * output:
            raise SystemExit(f"{server.name} gave {figures['tokens']} tokens where {num_requests * output} were due")
        return figures

    def _say(self, what: str) -> None:
        print(f"{time.monotonic() - self._began:5.0f} s  {what}", file=sys.stderr, flush=True)


def _seed(number: int, kind: int) -> int:
    """Other prompts for each measure of a server, the same for every server."""
    return 1000 * (number + 1) + kind


def figures_table(records: dict[str, Record]) -> str:
    """The median round of every figure, a line for each server and number of streams."""
    lines = [
        "| server | streams | tok/s | TTFT p50, together / all ms | gap p50 / p99 ms | server CPU ms/token | RSS MiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, record in records.items():
        for num_streams, rounds in record.streams.items():

            def median(key: str, share: str | None = None, rounds: list[Figures] = rounds) -> float:
                return statistics.median(figures[key] if share is None else figures[key][share] for figures in rounds)

            cpu = statistics.median(1e3 * figures["server_cpu_seconds"] / figures["tokens"] for figures in rounds)
            lines.append(
                f"| {name} | {num_streams} | {median('tokens_per_second'):,.0f} "
                f"| {median('first_ttft_ms', 'p50'):,.0f} / {median('ttft_ms', 'p50'):,.0f} "
                f"| {median('gap_ms', 'p50'):.1f} / {median('gap_ms', 'p99'):.1f} | {cpu:.2f} "
                f"| {median('rss_mib'):,.0f} |"
            )
    lines += ["", "| server | prefill tok/s | first answer, ready s |", "| --- | ---: | ---: |"]
    for name, record in records.items():
        prefill = f"{statistics.median(_prefill(record)):,.0f}" if record.prefill else ""
        started = f"{statistics.median(record.answers):.2f}, {statistics.median(record.starts):.2f}"
        lines.append(f"| {name} | {prefill} | {started} |")
    return "\n".join(lines)


def ratio_table(records: dict[str, Record]) -> str:
    """Return the ratios of Headrace to each peer, with their targets."""
    peers = [name for name in (VLLM, LLAMA) if name in records]
    if HEADRACE not in records or not peers:
        return ""
    lines = [
        "| | " + " | ".join(f"wanted of {peer} | seen" for peer in peers) + " |",
        "| --- |" + " ---: | ---: |" * len(peers),
    ]
    for ratio in RATIOS:
        cells = [cell for peer in peers for cell in ratio.of(records[HEADRACE], records[peer], peer)]
        lines.append(f"| {ratio.label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _machine() -> dict[str, str]:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = f"{len(names)} x {names[0].partition(':')[2].strip()}" if names else platform.machine()
    return {"processor": model, "python": platform.python_version(), "torch": version("torch")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="the environment that vLLM is installed in")
    parser.add_argument("--llama", type=Path, metavar="EXECUTABLE", help="llama.cpp's llama-server")
    parser.add_argument("--servers", help=f"of {HEADRACE},{VLLM},{LLAMA}. Default: Headrace and the peers given above")
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of half the requests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure of every round there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the servers on the way out, as Ctrl-C does
    given = [HEADRACE, *([VLLM] if options.vllm else []), *([LLAMA] if options.llama else [])]
    names = options.servers.split(",") if options.servers else given
    streams = [int(number) for number in options.streams.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        places = {"vllm": options.vllm, "llama": options.llama}
        comparison = Comparison(
            [make_server(name, **places, max_streams=max(streams), scratch=Path(scratch)) for name in names]
        )
        comparison.run(streams, 1 if options.quick else options.rounds, scale=0.5 if options.quick else 1.0)
    records = comparison.records
    print(figures_table(records), ratio_table(records), sep="\n\n")
    if options.json:
        content = {"machine": _machine(), "servers": {name: vars(record) for name, record in records.items()}}
        options.json.write_text(json.dumps(content, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
