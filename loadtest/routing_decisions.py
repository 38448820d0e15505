"""Measure the cost of a routing decision while requests come and go.

    python -m loadtest.routing_decisions [--engines 64] [--rate 1000] [--seconds 5] [--prompt 2048]
        [--system-prompt 0] [--max-chunks N] [--json FILE]

Requests come at a rate, each with one of some prefixes; engines publish what they store and evict, as much as such a
load makes them. In one thread, without engines. Prints microseconds of `Router.choose`, of all that a request costs the
router from arrival to end, the share of the thread that it takes, and the memory of the index. It is the thread's
processor time, which others on the machine do not change.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from array import array
from collections import deque

import numpy as np

from engine.costs.table import Curve, StepCostTable
from engine.kv_events import KVEvents, PrefixHashes
from engine.routing.prefix_index import MAX_CHUNKS, PrefixIndex
from engine.routing.router import Router

SLOTS = 64
TOKENS_PER_ENGINE = 2**20  # of KV cache
PREFIXES_PER_ENGINE = 16
COSTS = StepCostTable(
    decode=Curve([1, SLOTS], [0.02, 0.04]), prefill=Curve([1, 8192], [0.02, 0.8]), mixed=Curve([1, 8192], [0.0, 0.8])
)


class Engine:
    """The published cache of one engine, in chunks; each new chunk replaces the oldest."""

    def __init__(self, number: int, num_chunks: int) -> None:
        self.number, self.num_chunks, self.sequence = number, num_chunks, 0
        self.chunks: deque[int] = deque()

    def compute(self, hashes: list[int]) -> KVEvents:
        self.chunks.extend(hashes)
        removed = [self.chunks.popleft() for _ in range(max(0, len(self.chunks) - self.num_chunks))]
        self.sequence += 1
        return KVEvents(
            epoch=self.number,
            sequence=self.sequence,
            stored=array("Q", hashes).tobytes(),
            removed=array("Q", removed).tobytes(),
        )


def hashes_of(tokens: list[int], router: Router) -> list[int]:
    hashes = PrefixHashes(router.key, router.chunk_size, "", "")
    return [hashes.extend(tokens) for _ in range(len(tokens) // router.chunk_size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1000.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=5.0, help="of requests, which are not waited for")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens, seven eighths of which others share")
    parser.add_argument("--system-prompt", type=int, default=0, help="tokens that all begin with, in all engines")
    parser.add_argument("--max-chunks", type=int, default=MAX_CHUNKS, help="that the router knows at most")
    parser.add_argument("--json", help="write the figures here")
    options = parser.parse_args()
    draw = random.Random(0)
    router = Router(options.engines, SLOTS, key=b"benchmark", index=PrefixIndex(options.max_chunks))
    engines = [Engine(number, TOKENS_PER_ENGINE // router.chunk_size) for number in range(options.engines)]
    system_prompt = draw.choices(range(100_000), k=options.system_prompt)
    for engine in engines:
        router.set_costs(engine.number, COSTS)
        filling = [draw.getrandbits(64) for _ in range(engine.num_chunks)]
        router.apply(engine.number, engine.compute(filling + hashes_of(system_prompt, router)))
    shared = options.prompt * 7 // 8
    prefixes = [
        array("I", system_prompt + draw.choices(range(100_000), k=shared - len(system_prompt)))
        for _ in range(PREFIXES_PER_ENGINE * options.engines)
    ]
    alive = list(range(options.engines))
    living: deque[tuple[str, int, array[int]]] = deque()
    chosen_in, all_in, num_bytes = [], [], 0
    for number in range(round(options.rate * options.seconds)):
        # As new in memory as what a tokenizer has just given.
        prompt = draw.choice(prefixes).tolist() + draw.choices(range(100_000), k=options.prompt - shared)
        began = time.thread_time()
        chosen_engine = router.choose([str(number)], prompt, alive, max_tokens=256)
        chosen = time.thread_time()
        living.append((str(number), chosen_engine, array("I", prompt)))
        spent = 0.0
        if len(living) > options.engines * SLOTS // 2:
            name, at, computed = living.popleft()
            stored = hashes_of(computed.tolist(), router)
            events = engines[at].compute([each for each in stored if each not in router.index._chunks[at]])
            num_bytes += len(events.stored) + len(events.removed)
            since = time.thread_time()
            router.apply(at, events)
            for _ in range(16):  # deliveries of several tokens each
                router.advanced(name, 16)
            router.ended(name, by_itself=True)
            spent = time.thread_time() - since
        chosen_in.append(chosen - began)
        all_in.append(chosen - began + spent)
    p50, p99, most = (float(np.percentile(chosen_in, p) * 1e6) for p in (50, 99, 100))
    figures = {
        "engines": options.engines,
        "prompt_tokens": options.prompt,
        "choose_p50_us": p50,
        "choose_p99_us": p99,
        "choose_max_us": most,
        "request_mean_us": float(np.mean(all_in) * 1e6),
        "share_of_a_thread": float(np.mean(all_in) * options.rate),
        "index_megabytes": router.index.num_bytes / 2**20,
        "event_bytes_per_request": num_bytes / len(all_in),
        "by_prefix": router.num_by_prefix / len(all_in),
    }
    print(", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(figures, file)


if __name__ == "__main__":
    main()
