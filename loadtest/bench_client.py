"""Measure the error of `headrace bench serve`, and compare its totals with those of vLLM's client.

    python -m loadtest.bench_client                                 the error alone
    python -m loadtest.bench_client --vllm peers/vllm --rounds 3    both, with vLLM's client in turn

The error is measured against a server of known timing: a process that computes nothing, takes requests, and writes a
token to all of its streams at each step, as an engine does, so that all of them arrive at once. It notes when it began
and ended to write the first token of each request, on the clock that both processes read (CLOCK_MONOTONIC). How far
what a client says of the same arrival lies outside is its error. The totals are those of Headrace with the
embedded model under the same load, in turn from both clients.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpu.checkpoint import open_model
from loadtest.export_model import write_tokenizer
from loadtest.servers import ROOT, Server, headrace

STEP = 0.03  # seconds between two tokens of a stream
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
NUM_TOKENS, NUM_WORDS = 32, 32
TOTALS = ("completed", "total_input_tokens", "total_output_tokens", "request_throughput", "output_throughput")
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_ID = re.compile(rb"x-request-id: *(\S+)", re.IGNORECASE)


class Stepper(asyncio.Protocol):
    """A connection of the server of known timing. All that have asked get a token at each step."""

    active: set[Stepper] = set()  # noqa: RUF012 - of the process
    sent: dict[str, tuple[float, float]] = {}  # noqa: RUF012 - from when to when each first token was being written

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not found or (length and len(body) < int(length[1])):
            return
        self._received = b""
        if head.startswith(b"POST"):
            identity = _ID.search(head)
            self._id, self._num_sent = identity[1].decode() if identity else "", 0
            self.active.add(self)
            return
        path = head.split(b" ", 2)[1]
        known = {b"/v1/models": {"data": [{"id": "stepper"}]}, b"/sent": self.sent}
        answer = json.dumps(known.get(path, {})).encode()
        status = b"200 OK" if path in known else b"404 Not Found"
        self._transport.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(answer), answer))

    def connection_lost(self, error: Exception | None) -> None:
        self.active.discard(self)

    def token(self) -> None:
        """Write one, and the end after the last."""
        began = time.perf_counter()
        event = _chunk({"choices": [{"index": 0, "text": " word", "finish_reason": None}]})
        if not self._num_sent:
            event = HEAD + event
        self._num_sent += 1
        if self._num_sent == NUM_TOKENS:
            usage = {
                "prompt_tokens": NUM_WORDS,
                "completion_tokens": NUM_TOKENS,
                "total_tokens": NUM_WORDS + NUM_TOKENS,
            }
            event += _chunk({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
            event += _chunk({"choices": [], "usage": usage}) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
            self.active.discard(self)
        self._transport.write(event)
        if self._num_sent == 1:
            self.sent[self._id] = began, time.perf_counter()


def _chunk(event: dict[str, Any]) -> bytes:
    # As long as what servers write: names and times are part of each event.
    usual = {"id": "cmpl-00000000000000000000000000000000", "object": "text_completion", "created": 1780000000}
    data = f"data: {json.dumps(usual | event)}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve_steps(port: int) -> None:
    """Serve until killed, on asyncio's event loop, because it writes at once."""
    await asyncio.get_running_loop().create_server(Stepper, "127.0.0.1", port)
    gc.disable()
    due = time.perf_counter()
    while True:
        due = max(due + STEP, time.perf_counter())
        await asyncio.sleep(due - time.perf_counter())
        for stream in list(Stepper.active):
            stream.token()


def run_client(program: Sequence[str], url: str, model: str, tokenizer: Path, **load: object) -> dict[str, Any]:
    """The detailed result of one load by a client that knows the flags of vLLM's `bench serve`."""
    with tempfile.TemporaryDirectory() as directory:
        options = {"base-url": url, "model": model, "tokenizer": tokenizer, "result-dir": directory} | {
            name.replace("_", "-"): value for name, value in load.items()
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = [*program, "bench", "serve", *words, "--temperature", "0", "--ignore-eos", "--disable-tqdm"]
        command += ["--result-filename", "r.json", "--save-result", "--save-detailed"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        if done.returncode:
            raise SystemExit(f"{program[0]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        result: dict[str, Any] = json.loads((Path(directory) / "r.json").read_text())
        return result


def ttft_errors(result: dict[str, Any], sent: dict[str, tuple[float, float]], prefix: str) -> list[float]:
    """Return the error of each request in ms."""
    arrivals = [start + ttft for start, ttft in zip(result["start_times"], result["ttfts"], strict=True)]
    spans = [sent[f"{prefix}{number}"] for number in range(len(arrivals))]
    return [1e3 * max(0.0, begun - at, at - ended) for at, (begun, ended) in zip(arrivals, spans, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,16,64,256")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="a virtual environment with vLLM")
    parser.add_argument(
        "--totals", type=int, default=64, metavar="N", help="requests of each load on Headrace; 0: none"
    )
    parser.add_argument("--serve-steps", type=int, metavar="PORT", help="be the server of known timing")
    options = parser.parse_args()
    if options.serve_steps:
        asyncio.run(serve_steps(options.serve_steps))
    clients = {"headrace": [sys.executable, "-m", "app.commands.cli"]}
    if options.vllm:
        clients["vLLM"] = [str(options.vllm / "bin" / "vllm")]
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = write_tokenizer_of_embedded(Path(directory))
        known = Server(
            "steps", [sys.executable, "-m", "loadtest.bench_client", "--serve-steps", "{port}"],
            model="stepper", ready_path="/v1/models",
        )  # fmt: skip
        print("| client | streams | TTFT error p50 / p90 / p99 / max ms |\n| --- | ---: | ---: |")
        with known as target:
            for streams in map(int, options.streams.split(",")):
                errors: dict[str, list[float]] = {name: [] for name in clients}
                for number in range(options.rounds):
                    for name, program in clients.items():
                        prefix = f"{name}-{streams}-{number}-"
                        result = run_client(
                            program, target.url, "stepper", tokenizer, max_concurrency=streams, seed=number,
                            num_prompts=4 * streams, random_input_len=NUM_WORDS, random_output_len=NUM_TOKENS,
                            request_id_prefix=prefix,
                        )  # fmt: skip
                        sent = _get(f"{target.url}/sent")
                        errors[name] += ttft_errors(result, sent, prefix)
                for name, values in errors.items():
                    shown = " / ".join(f"{value:.2f}" for value in np.percentile(values, (50, 90, 99, 100)))
                    print(f"| {name} | {streams} | {shown} |", flush=True)
        if options.totals:
            compare_totals(clients, tokenizer, options.totals, options.rounds)
    return 0


def compare_totals(clients: dict[str, list[str]], tokenizer: Path, num_prompts: int, num_rounds: int) -> None:
    """Both clients on the same server, in turn, closed and open loop."""
    print(f"\n| load | client | {' | '.join(TOTALS)} |\n| --- | --- |{' ---: |' * len(TOTALS)}")
    loads: dict[str, dict[str, object]] = {"8 at a time": {"max_concurrency": 8}, "2 per second": {"request_rate": 2}}
    with headrace("headrace", max_num_seqs=8, enable_prefix_caching=False) as target:
        for title, load in loads.items():
            taken: dict[str, list[dict[str, Any]]] = {name: [] for name in clients}
            for number in range(-1, num_rounds):
                for name, program in clients.items():
                    result = run_client(
                        program, target.url, target.model, tokenizer, num_prompts=num_prompts, seed=number + 1,
                        random_input_len=64, random_output_len=64, **load,
                    )  # fmt: skip
                    taken[name] += [result] if number >= 0 else []  # the first is a warm-up
            medians = {name: [float(np.median([r[key] for r in rs])) for key in TOTALS] for name, rs in taken.items()}
            for name, values in medians.items():
                print(f"| {title} | {name} | {' | '.join(f'{value:,.2f}' for value in values)} |", flush=True)
            if len(medians) > 1:
                ours, theirs = medians.values()
                cells = " | ".join(f"{100 * (a / b - 1):+.2f} %" for a, b in zip(ours, theirs, strict=True))
                print(f"| {title} | difference | {cells} |", flush=True)


def write_tokenizer_of_embedded(directory: Path) -> Path:
    """A directory with what vLLM's client needs to make prompts."""
    files = open_model("smollm2-135m-instruct")
    write_tokenizer(files, directory)
    (directory / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    return directory


def _get(url: str) -> Any:
    import urllib.request

    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main())
