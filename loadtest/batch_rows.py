"""Measure what a running batch costs a stream that is sent directly: its gaps between tokens and its first token.

    python -m loadtest.batch_rows                      ten rounds of one stream and of four
    python -m loadtest.batch_rows --rounds 4 --streams 1

A round measures the same streams twice, without a batch and while one runs, in changing order; the batch has rows that
are answered as soon as no stream is left. Printed are the medians over all rounds, and the ratio of the two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import openai

from loadtest.servers import Target, headrace

ROWS = 2000
PAUSE_SECONDS = 1.0  # between two measurements: the batch has the engine
ENDPOINT: Any = "/v1/completions"


@contextmanager
def batch(client: openai.OpenAI, model: str) -> Iterator[None]:
    """Run a batch in the block, and cancel it afterwards. Fails if no row was answered."""
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True}
    line = {"method": "POST", "url": ENDPOINT, "body": body}
    content = "".join(json.dumps({"custom_id": str(number)} | line) + "\n" for number in range(ROWS))
    file = client.files.create(file=content.encode(), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
    while _state(client, made.id).status != "in_progress":
        time.sleep(0.1)
    time.sleep(PAUSE_SECONDS)
    try:
        yield
    finally:
        client.batches.cancel(made.id)
        while (state := _state(client, made.id)).status != "cancelled":
            time.sleep(0.1)
        print(f"    rows answered: {state.request_counts.completed}", flush=True)


def _state(client: openai.OpenAI, batch_id: str) -> Any:
    return client.batches.retrieve(batch_id)


class Stream(threading.Thread):
    """One stream; `times` are those of its beginning and of every token."""

    def __init__(self, client: openai.OpenAI, model: str, num_tokens: int) -> None:
        super().__init__()
        self.times = [time.perf_counter()]
        self.has_begun = threading.Event()
        body = {"prompt": "The history of the sea", "max_tokens": num_tokens, "stream": True}
        self._ask: Any = partial(client.completions.create, model=model, **body, extra_body={"ignore_eos": True})

    def run(self) -> None:
        for _ in self._ask():
            self.times.append(time.perf_counter())
            self.has_begun.set()


def measure(client: openai.OpenAI, target: Target, num_streams: int, num_tokens: int) -> dict[str, float]:
    """Return milliseconds: of gaps, of the first token, and of the server's processors per token, while all streams
    have begun. Processor time does not depend on what else the machine does."""
    streams = [Stream(client, target.model, num_tokens) for _ in range(num_streams)]
    for each in streams:
        each.start()
    for each in streams:
        each.has_begun.wait()
    begun, processors = time.perf_counter(), target.cpu_seconds()
    streams[0].join()
    ended, processors = time.perf_counter(), target.cpu_seconds() - processors
    for each in streams:
        each.join()
    gaps = sorted(1e3 * (later - earlier) for each in streams for earlier, later in pairwise(each.times[1:]))
    tokens = sum(begun < at <= ended for each in streams for at in each.times)
    return {
        "gap mean": statistics.mean(gaps),
        "gap p50": gaps[len(gaps) // 2],
        "gap p99": gaps[len(gaps) * 99 // 100],
        "processor": 1e3 * processors / tokens,
        "first token": statistics.median(1e3 * (each.times[1] - each.times[0]) for each in streams),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, headrace("headrace", files_dir=folder) as target:
        client = openai.OpenAI(base_url=f"{target.url}/v1", api_key="any", timeout=600)
        for num_streams in options.streams:
            measure(client, target, num_streams, options.tokens)
            found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
            for number in range(options.rounds):
                for with_batch in (number % 2 == 0, number % 2 == 1):
                    with batch(client, target.model) if with_batch else nullcontext():
                        found[with_batch].append(measure(client, target, num_streams, options.tokens))
            print(f"{num_streams} streams, {options.rounds} rounds")
            for name in found[True][0]:
                without, during = ([each[name] for each in found[which]] for which in (False, True))
                ratio = statistics.median(b / a for a, b in zip(without, during, strict=True))
                medians = f"{statistics.median(without):8.2f} ms without, {statistics.median(during):8.2f} ms with"
                ratios = ", ".join(f"{b / a:.2f}" for a, b in zip(without, during, strict=True))
                print(f"  {name:12} {medians}, ratio {ratio:.3f} (of the rounds: {ratios})", flush=True)


if __name__ == "__main__":
    main()
