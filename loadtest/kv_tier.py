"""What KV blocks on disk are worth, and what they cost: ratios of one run, on this machine.

    python -m loadtest.kv_tier [--rounds 3] [--prompt 8000]

Three questions, each of two servers of the embedded model with and without `kv_cache_dir`, which take turns so that
neighbours harm both alike:

- the first token after a restart, of a long prompt that is on disk, over that of one that is computed. Each server has
  answered a short prompt before;
- output tokens per second where nothing is ever found: every prompt is new;
- the gap between two tokens of four streams, while the blocks of a long prompt before them are stored.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from loadtest.servers import Server, Target, headrace

STREAMS = 4
STREAM_TOKENS = 160

_new = itertools.count(1)


def prompt(length: int) -> list[int]:
    """Token ids that no other prompt begins with."""
    draw = random.Random(next(_new))
    return [draw.randrange(1000, 40000) for _ in range(length)]


def complete(target: Target, token_ids: Sequence[int], max_tokens: int = 1) -> list[float]:
    """When each token of a streamed greedy completion came, in seconds since it was asked for."""
    body: dict[str, Any] = {"prompt": list(token_ids), "max_tokens": max_tokens, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True, "model": target.model}
    request = urllib.request.Request(
        f"{target.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as answer:
        return [time.perf_counter() - began for line in answer if line.startswith(b"data: {") and b'"text"' in line]


def together(target: Target, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[float]]:
    """The same for several at once."""
    found: list[list[float]] = []
    threads = [
        threading.Thread(target=lambda each=each: found.append(complete(target, each, max_tokens))) for each in prompts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(prompts), "a request failed"
    return found


def settle(folder: Path) -> None:
    """Wait until nothing more is stored."""
    before = -1
    while (now := sum(1 for _ in folder.glob("*/*.kv"))) != before:
        before = now
        time.sleep(0.5)


def restarts(folder: Path, length: int, rounds: int) -> None:
    seconds: dict[str, list[float]] = {"computed": [], "from disk": []}
    for _ in range(rounds):
        long = prompt(length)
        for found in seconds.values():
            with headrace("headrace", kv_cache_dir=folder) as target:
                complete(target, prompt(40))
                found.append(complete(target, long)[0])
                settle(folder)
    ratios = [cold / warm for cold, warm in zip(*seconds.values(), strict=True)]
    print(
        f"first token after a restart, {length:,} tokens: {statistics.median(seconds['computed']):.2f} s computed, "
        f"{statistics.median(seconds['from disk']):.3f} s from disk: {_spread(ratios)}"
    )


def in_turns(folder: Path, rounds: int, measure: Callable[[Target], float]) -> list[float]:
    """What is measured with the directory over what is measured without, for each round."""
    servers: list[Server] = [headrace("without"), headrace("with", kv_cache_dir=folder)]
    ratios: list[float] = []
    with ExitStack() as stack:
        targets = [stack.enter_context(server) for server in servers]
        for number in range(-1, rounds):
            found: dict[str, float] = {}
            for target in targets[:: 1 if number % 2 else -1]:
                found[target.name] = measure(target)
                settle(folder)
            if number >= 0:
                ratios.append(found["with"] / found["without"])
    return ratios


def throughput(target: Target) -> float:
    """Tokens per second."""
    prompts = [prompt(512) for _ in range(8)]
    began = time.perf_counter()
    together(target, prompts, 64)
    return 8 * 64 / (time.perf_counter() - began)


def processor_time(target: Target) -> float:
    """The same in tokens per second of the server's processor time, which neighbours change less. Storing counts in
    full, also what is done when nobody waits."""
    began = target.cpu_seconds()
    together(target, [prompt(512) for _ in range(8)], 64)
    time.sleep(1.0)
    return 8 * 64 / (target.cpu_seconds() - began)


def mean_gap(target: Target) -> float:
    complete(target, prompt(2000))  # some 45 MB, which are stored from now on
    found = together(target, [prompt(16) for _ in range(STREAMS)], STREAM_TOKENS)
    return statistics.mean((times[-1] - times[0]) / (len(times) - 1) for times in found)


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.3f} x ({min(ratios):.3f} to {max(ratios):.3f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=8000, help="tokens of the long prompt")
    parser.add_argument("--measures", help="some of restart, throughput, processor, gap, comma separated; default: all")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, rounds = Path(scratch), options.rounds
        measures: dict[str, Callable[[], None]] = {
            "restart": lambda: restarts(folder, options.prompt, rounds),
            "throughput": lambda: print(
                f"throughput, nothing found: {_spread(in_turns(folder, 2 * rounds, throughput))}"
            ),
            "processor": lambda: print(f"by processor time: {_spread(in_turns(folder, rounds, processor_time))}"),
            "gap": lambda: print(
                f"gap between tokens while storing: {_spread(in_turns(folder, 2 * rounds, mean_gap))}"
            ),
        }
        for name in options.measures.split(",") if options.measures else measures:
            measures[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
