"""Measure the cost of tracing with a model that costs nothing: all requests traced, one in a hundred, none.

    python -m loadtest.tracing_cost --rounds 9

Starts one server of `plumbing`'s dummy model for each and asks them in turn. Requests are short (16 tokens), because
the cost is per request. The collector takes what comes and looks at none of it. Ratios are medians over pairs of one
round; of the processor time the lowest round counts, because other work on the machine only adds to it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from loadtest.plumbing import NAME, dummy_server, write_model


class Sink(BaseHTTPRequestHandler):
    """Answers every export with 200."""

    protocol_version = "HTTP/1.1"
    num_bytes = 0

    def do_POST(self) -> None:
        Sink.num_bytes += len(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--requests", type=int, default=600, help="of each server in each round")
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()
    with ExitStack() as stack:
        sink = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Sink))
        threading.Thread(target=sink.serve_forever, daemon=True).start()
        traced = {"otlp_endpoint": f"http://127.0.0.1:{sink.server_port}"}
        model = write_model(Path(stack.enter_context(tempfile.TemporaryDirectory())) / NAME)
        kinds = {"off": {}, "0.01": traced, "1": traced}
        targets = {}
        os.environ["OTEL_TRACES_SAMPLER"] = "parentbased_traceidratio"
        for kind, settings in kinds.items():
            os.environ["OTEL_TRACES_SAMPLER_ARG"] = "0" if kind == "off" else kind
            targets[kind] = stack.enter_context(dummy_server(model, "thread", **settings))
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        costs: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(-1, options.rounds):  # the first does not count
            for kind in kinds if number % 2 else reversed(kinds):
                figures = targets[kind].measure(
                    options.streams, options.requests, seed=number + 1, max_tokens=options.tokens
                )
                if figures["failed"]:
                    sys.exit(f"{kind}: {figures['failed']}")
                if number >= 0:
                    rates[kind].append(figures["requests"] / figures["seconds"])
                    costs[kind].append(1e6 * figures["server_cpu_seconds"] / figures["requests"])
        print("| traced | requests/s | of those without | server CPU µs/request, lowest round |")
        print("| --- | ---: | ---: | ---: |")
        for kind in kinds:
            ratio = statistics.median(a / b for a, b in zip(rates[kind], rates["off"], strict=True))
            print(f"| {kind} | {statistics.median(rates[kind]):.0f} | {ratio:.2f} | {min(costs[kind]):.0f} |")
        print(f"{Sink.num_bytes / 2**20:.1f} MiB of spans")
        sink.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
