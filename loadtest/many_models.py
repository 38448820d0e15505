"""Measure a server of several models: token gaps while another model loads, and waits with room for three of ten.

Start it with ten copies (or links) of a small model, then run this:

    headrace serve --models-dir FOLDER --kv-cache-memory 64MiB --memory 1GiB
    python -m loadtest.many_models http://127.0.0.1:8000 --requests 60
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from itertools import pairwise

import httpx

PROMPT = {"prompt": "The sea is", "temperature": 0, "ignore_eos": True}


def ask(client: httpx.Client, model: str, max_tokens: int = 1) -> tuple[float, list[float], int]:
    """Return the seconds to the first token, the gaps after it, and the status."""
    started = time.perf_counter()
    times: list[float] = []
    body = {**PROMPT, "model": model, "max_tokens": max_tokens, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {") and '"error"' not in line)
        times.extend(time.perf_counter() for _ in lines)
    gaps = [after - before for before, after in pairwise(times)]
    return (times[0] - started if times else float("nan")), gaps, answer.status_code


def main() -> None:
    """Print the figures of both measurements."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=300)
    arguments = parser.parse_args()
    client = httpx.Client(base_url=arguments.url, timeout=600)
    names = [card["id"] for card in client.get("/v1/models").json()["data"]]

    ask(client, names[0])
    _, alone, _ = ask(client, names[0], arguments.tokens)
    loads: list[float] = []
    other = threading.Timer(0.5, lambda: loads.append(ask(client, names[1])[0]))
    other.start()
    _, beside, _ = ask(client, names[0], arguments.tokens)
    other.join()
    for name, measure in (("mean", statistics.mean), ("median", statistics.median)):
        ratio = measure(beside) / measure(alone)
        print(f"{name} gap: {measure(alone) * 1e3:.1f} ms alone, {measure(beside) * 1e3:.1f} ms, ratio {ratio:.2f}")
    print(f"first token of the model that was loaded meanwhile: {loads[0]:.2f} s")

    waits, failed, draw = [], 0, random.Random(0)
    weights = [1 / (place + 1) for place in range(len(names))]
    lock = threading.Lock()

    def work(count: int) -> None:
        nonlocal failed
        for _ in range(count):
            with lock:
                (name,) = draw.choices(names, weights)
            wait, _, status = ask(client, name, 8)
            with lock:
                waits.append(wait)
                failed += status != 200

    workers = [threading.Thread(target=work, args=(arguments.requests // 4,)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    waits.sort()
    p99 = waits[int(0.99 * (len(waits) - 1))]
    print(f"Zipf over {len(names)}: {len(waits)} requests, {failed} failed, median wait {waits[len(waits) // 2]:.2f} s")
    print(f"p99 {p99:.2f} s, {p99 / loads[0]:.1f} x the load above")


if __name__ == "__main__":
    main()
