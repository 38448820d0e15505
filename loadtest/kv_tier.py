"""Measure gains and costs of KV blocks on disk: ratios of one run, on this machine.

    python -m loadtest.kv_tier [--rounds 3] [--prompt 8000]

- The first token after a restart, of a long prompt that is computed, over that of one that is on disk. Each server has
  answered a short prompt before.
- Where nothing is ever found: the time that 512 tokens of prompt and 32 of answer take with storing, over that without.
- The gap between two tokens of four streams while blocks are stored, over that while none are.

The last two are taken in one engine in this process, which stores or does not by turns of a second or less: neighbours
harm both alike.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from app.library import LLM
from engine.core.core import EngineCore
from engine.messages import EngineCoreRequest, SamplingParams
from loadtest.servers import Target, headrace

STREAMS = 4
STEPS = 40  # of a turn

_new = itertools.count(1)


def prompt(length: int) -> list[int]:
    """Token ids that no other prompt begins with."""
    draw = random.Random(next(_new))
    return [draw.randrange(1000, 40000) for _ in range(length)]


def first_token(target: Target, token_ids: Sequence[int]) -> float:
    """Seconds until the first token of a streamed greedy completion."""
    body: dict[str, Any] = {"prompt": list(token_ids), "max_tokens": 1, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"{target.url}/v1/completions",
        json.dumps(body | {"model": target.model, "ignore_eos": True}).encode(),
        {"content-type": "application/json"},
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                return time.perf_counter() - began
    raise SystemExit("a request failed")


def settle(folder: Path) -> None:
    """Wait until nothing more is stored."""
    before = -1
    while (now := sum(1 for _ in folder.glob("*/*.kv"))) != before:
        before = now
        time.sleep(1.0)


def restarts(folder: Path, length: int, rounds: int) -> None:
    seconds: dict[str, list[float]] = {"computed": [], "from disk": []}
    for _ in range(rounds):
        long = prompt(length)
        for found in seconds.values():
            with headrace("headrace", kv_cache_dir=folder) as target:
                first_token(target, prompt(40))
                found.append(first_token(target, long))
                settle(folder)
    ratios = [cold / warm for cold, warm in zip(*seconds.values(), strict=True)]
    print(
        f"first token after a restart, {length:,} tokens: {statistics.median(seconds['computed']):.2f} s computed, "
        f"{statistics.median(seconds['from disk']):.3f} s from disk: {_spread(ratios)}"
    )


class Engine:
    """An engine with a switch for storing."""

    def __init__(self, folder: Path) -> None:
        self.core: EngineCore = LLM(kv_cache_dir=folder, kv_cache_memory="2GiB", progress=False).core
        self._tiers = self.core.scheduler.kv.tiers
        assert self._tiers is not None
        self._after_step = self.core._hooks.after_step

    def _let_store(self, stores: bool) -> None:
        store = self._tiers.after_step  # type: ignore[union-attr]
        self.core._hooks.after_step = tuple(each for each in self._after_step if stores or each != store)

    def add(self, token_ids: list[int], max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=0)
        self.core.add(
            EngineCoreRequest(
                request_id=f"{next(_new)}", prompt_token_ids=token_ids, sampling=sampling, arrival_time=0.0
            )
        )

    def turns(self, rounds: int, turn: Callable[[], None]) -> list[float]:
        """Return the time of a turn with storing over one without, for each pair of turns."""
        ratios: list[float] = []
        for number in range(rounds + 1):
            seconds: dict[bool, float] = {}
            for stores in (True, False) if number % 2 else (False, True):
                self._let_store(stores)
                began = time.perf_counter()
                turn()
                seconds[stores] = time.perf_counter() - began
                while len(self._tiers.tier._free) < 8:  # type: ignore[union-attr]
                    time.sleep(0.001)
            if number:
                ratios.append(seconds[True] / seconds[False])
        return ratios

    def requests(self) -> None:
        self.add(prompt(512), 32)
        while self.core.has_work:
            self.core.step()

    def steps(self) -> None:
        for _ in range(STEPS):
            self.core.step()

    def streams(self) -> None:
        """Start streams after a long prompt with blocks that still have to be stored."""
        core = self.core
        self._let_store(False)
        self.add(prompt(7000), 1)
        while core.has_work:
            core.step()
        for _ in range(STREAMS):
            self.add(prompt(16), 7000)
        core.step()


def _spread(ratios: Sequence[float]) -> str:
    ordered = sorted(ratios)
    quarter = len(ordered) // 4
    return f"{statistics.median(ratios):.3f} x (half between {ordered[quarter]:.3f} and {ordered[-1 - quarter]:.3f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="restarts; the other measures take twenty times as many")
    parser.add_argument("--prompt", type=int, default=8000, help="tokens of the long prompt")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        engine = Engine(Path(scratch))
        print(
            f"time of requests of which nothing is found: {_spread(engine.turns(20 * options.rounds, engine.requests))}"
        )
        engine.streams()
        print(f"gap between tokens while storing: {_spread(engine.turns(20 * options.rounds, engine.steps))}")
        engine.core.shutdown()
        if options.rounds:
            restarts(Path(scratch), options.prompt, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
