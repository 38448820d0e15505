"""Compare the simulator with a running server in nine cells, with the server's own table of step costs.

    python -m loadtest.simulated_and_measured                  embedded model, about ten minutes
    python -m loadtest.simulated_and_measured --requests 2     short
    python -m loadtest.simulated_and_measured --json FILE      with every figure

1, 8 and 32 streams, each a client that asks, reads to the end and asks again; chats (prompts of 64 to 192 tokens that
share nothing), agents (nine tenths of a prompt of 1,000 tokens are those of the request before), long prompts (1,500
tokens). Prompts are sent as token ids, so the simulator has the very same. The prefix cache is emptied before each
cell. Before the cells comes a run of each kind that warms the table; the table is read before and after each cell, and
the simulator is given the later one: `--table-before` gives it the earlier, which is what a prediction has.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import uvloop

from app.bench.driver import Driver, Turn
from app.client import ConnectionPool
from app.config.settings import Settings
from app.simulate.driver import simulate
from app.simulate.machine import Machine, with_settings
from app.workload.datasets import Piece, WorkloadRequest, token_ids_of
from app.workload.report import summarize
from loadtest.servers import Target, headrace

KEY = "admin-key-of-this-measure"
STREAMS = (1, 8, 32)
FIGURES = ("output_throughput", "mean_itl_ms", "median_itl_ms", "p99_itl_ms", "p50_ttft_ms", "p90_ttft_ms")
ALLOWED = {
    "output_throughput": 0.05,
    "mean_itl_ms": 0.05,
    "median_itl_ms": 0.05,
    "p99_itl_ms": 0.25,
    "p50_ttft_ms": 0.1,
    "p90_ttft_ms": 0.1,
}


class TokenDriver(Driver):
    """Sends prompts as token ids."""

    vocab_size = 0

    def _message(self, turn: Turn, said: list[str]) -> bytes:
        request, record = turn
        own = {"prompt": token_ids_of(request, self.vocab_size), "max_tokens": request.num_output_tokens}
        body = orjson.dumps(own | self._fields)
        return self._pool.message("POST", self._path, body, {"x-request-id": record.request_id})


def chat(streams: int, each: int, draw: random.Random) -> list[WorkloadRequest]:
    return [
        WorkloadRequest((Piece(f"chat {streams} {number}", draw.randint(64, 192)),), draw.randint(48, 96))
        for number in range(streams * each)
    ]


def agent(streams: int, each: int, draw: random.Random) -> list[WorkloadRequest]:
    return [
        WorkloadRequest((Piece(f"agent {streams} {number % streams}", 900), Piece(f"step {streams} {number}", 100)), 48)
        for number in range(streams * each)
    ]


def long(streams: int, each: int, draw: random.Random) -> list[WorkloadRequest]:
    return [WorkloadRequest((Piece(f"long {streams} {number}", 1500),), 32) for number in range(streams * each)]


KINDS = {"chat": chat, "agent": agent, "long": long}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=6, help="of each stream")
    parser.add_argument("--streams", type=lambda text: tuple(map(int, text.split(","))), default=STREAMS)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--table-before", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cells = []
    with headrace("headrace", admin_keys=KEY) as server:
        for kind in options.kinds:
            measure(server, KINDS[kind](4, 3, random.Random("warm up")), 4)
        print(f"{'cell':10}" + "".join(f"{name:>34}" for name in (*FIGURES, "cached tokens", "preemptions")))
        for kind in options.kinds:
            for streams in options.streams:
                ask(server, "/reset_prefix_cache", "POST")
                requests = KINDS[kind](streams, options.requests, random.Random(f"{kind} {streams}"))
                before, preempted = ask(server, "/server_info"), preemptions(server)
                measured = measure(server, requests, streams)
                measured["num_preemptions"] = preemptions(server) - preempted
                info = before if options.table_before else ask(server, "/server_info")
                told = predict(info, requests, streams)
                cells.append({"kind": kind, "streams": streams, "measured": measured, "simulated": told})
                print(f"{kind + ' ' + str(streams):10}" + row(measured, told), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(cells))


def measure(server: Target, requests: list[WorkloadRequest], streams: int) -> dict[str, Any]:
    """Return the result of the workload on the server."""

    async def run() -> dict[str, Any]:
        pool = ConnectionPool(server.url, {}, verify=True, timeout=600)
        await pool.open(1)
        driver = TokenDriver(
            pool, "/v1/completions", {"model": server.model, "ignore_eos": True, "temperature": 0.0},
            max_concurrency=streams,
        )  # fmt: skip
        driver.vocab_size = ask(server, "/server_info")["vocab_size"]
        return summarize(await driver.run(requests))

    return uvloop.run(run())


def predict(info: dict[str, Any], requests: list[WorkloadRequest], streams: int) -> dict[str, Any]:
    """Return the simulated result of the workload."""
    known = {
        name: value for name, value in info["settings"].items() if name in Settings.model_fields and value is not None
    }
    settings = with_settings(Settings(), known)
    outcome = simulate(
        [replace(each, arrival=0.0) for each in requests], Machine.of(info), settings, max_concurrency=streams
    )
    return outcome.result()


def row(measured: dict[str, Any], told: dict[str, Any]) -> str:
    cells = []
    for name in FIGURES:
        error = told[name] / measured[name] - 1 if measured[name] else 0.0
        missed = " " if abs(error) <= ALLOWED[name] else "!"
        cells.append(f"{measured[name]:9.2f} {told[name]:9.2f} {error:+7.1%}{missed}")
    for name in ("total_cached_tokens", "num_preemptions"):
        missed = " " if measured[name] == told[name] else "!"
        cells.append(f"{measured[name]:9d} {told[name]:9d}{missed}")
    return "".join(f"{cell:>34}" for cell in cells)


def ask(server: Target, path: str, method: str = "GET") -> Any:
    request = urllib.request.Request(server.url + path, method=method, headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def preemptions(server: Target) -> int:
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as answer:
        found = re.search(r"^[^#]\S*num_preemptions_total\S* (\S+)$", answer.read().decode(), re.MULTILINE)
    return int(float(found.group(1))) if found else 0


if __name__ == "__main__":
    main()
