"""Measure the cost of a token without the model: HTTP, validation, tokenizing, scheduling, detokenizing, SSE.

    python -m loadtest.plumbing                                      threads and streams at their defaults
    python -m loadtest.plumbing --engines thread,process --streams 1,16,64,256 --rounds 3
    python -m loadtest.plumbing --against http://127.0.0.1:8001 --against-model NAME --against-pid PID

Starts Headrace with a dummy model (one layer, hidden size 64, the embedded model's tokenizer), and drives it with
closed-loop clients in a second process: prompts of 32 words, 128 tokens each, greedy. With `--against` every measure
is taken on the other server, too, in turn, and printed as a ratio. `--write-model DIR` writes the model and ends, so
that another server can be started with it.

tok/s are the tokens that the servers' usage counts, over the time from the first connection to the last byte. A gap is
the time between two arrivals of text on one stream. CPU is seconds of user and system time during the load.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from loadtest.export_model import write_tokenizer
from loadtest.servers import Server, Target, headrace

NAME = "dummy"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
REQUESTS = {1: 16, 16: 192, 64: 512, 256: 1024}  # per measure: several seconds each, several requests per stream


def write_model(directory: Path, **changes: object) -> Path:
    """The dummy model as a Hugging Face directory without weights. `changes` are of its configuration."""
    from gpu.checkpoint import open_model

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    write_tokenizer(open_model("smollm2-135m-instruct"), directory)
    return directory


def dummy_server(model: Path, engine: str, **settings: object) -> Server:
    """Headrace with the dummy model. `settings` win over the usual ones."""
    usual = {"model": model, "served_model_name": NAME, "load_format": "dummy", "kv_cache_memory": "256MiB"}
    usual |= {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_queued_requests": 4096, "engine": engine}
    return headrace(f"headrace {engine}", **(usual | settings))


HEADER = (
    "| server | streams | tok/s | gap p50 / p99 ms | TTFT p50 / p99 ms | tokens per chunk "
    "| server CPU µs/token | client CPU µs/token | RSS MiB |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def row(name: str, num_streams: int, rounds: list[dict[str, Any]]) -> str:
    """The median round of each figure."""

    def median(*path: str) -> float:
        values = []
        for figures in rounds:
            value: Any = figures
            for key in path:
                value = value[key]
            values.append(value)
        return statistics.median(values)

    def per_token(key: str) -> float:
        return statistics.median(1e6 * figures[key] / max(figures["tokens"], 1) for figures in rounds)

    return (
        f"| {name} | {num_streams} | {median('tokens_per_second'):,.0f} "
        f"| {median('gap_ms', 'p50'):.1f} / {median('gap_ms', 'p99'):.1f} "
        f"| {median('ttft_ms', 'p50'):.0f} / {median('ttft_ms', 'p99'):.0f} | {median('tokens_per_chunk'):.2f} "
        f"| {per_token('server_cpu_seconds'):.0f} | {per_token('client_cpu_seconds'):.0f} | {median('rss_mib'):.0f} |"
    )


def ratios(num_streams: int, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    """Return the ratios to the other server of tokens per second and of gaps, pair by pair."""
    pairs = list(zip(ours, theirs, strict=True))
    speed = sorted(a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs)
    gap = sorted(a["gap_ms"]["p99"] / b["gap_ms"]["p99"] for a, b in pairs)
    return (
        f"  {num_streams} streams: {statistics.median(speed):.2f} x tok/s ({speed[0]:.2f} to {speed[-1]:.2f}), "
        f"gap p99 {statistics.median(gap):.2f} x ({gap[0]:.2f} to {gap[-1]:.2f})"
    )


def compare(targets: list[Target], streams: list[int], num_rounds: int, scale: float) -> int:
    """Measure all targets in turn, round by round, and print a table. Returns how many requests failed."""
    print(HEADER, flush=True)
    num_failed = 0
    summaries = []
    for num_streams in streams:
        num_requests = max(num_streams, int(scale * REQUESTS.get(num_streams, 4 * num_streams)))
        taken: dict[str, list[dict[str, Any]]] = {target.name: [] for target in targets}
        for target in targets:  # a warm-up that does not count
            target.measure(num_streams, num_streams, seed=1)
        for number in range(num_rounds):
            for target in targets if number % 2 == 0 else reversed(targets):
                figures = target.measure(num_streams, num_requests, seed=1000 * num_streams + number)
                num_failed += sum(figures["failed"].values())
                for why, count in figures["failed"].items():
                    print(f"{target.name}: {count} requests failed: {why}", file=sys.stderr)
                taken[target.name].append(figures)
        for target in targets:
            print(row(target.name, num_streams, taken[target.name]), flush=True)
        if targets[-1].name == "the other":
            summaries += [
                f"{target.name} / the other: {ratios(num_streams, taken[target.name], taken['the other'])}"
                for target in targets[:-1]
            ]
    print(*summaries, sep="\n")
    return num_failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="thread,process", help="of Headrace, each measured on a server of its own")
    parser.add_argument("--streams", default="1,16,64,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="times the usual number of requests")
    parser.add_argument("--against", help="the URL of another server, measured in turn")
    parser.add_argument("--against-model", default=NAME, help="what it calls its model")
    parser.add_argument("--against-pid", type=int, help="of its first process, for its CPU and memory")
    parser.add_argument("--write-model", type=Path, metavar="DIR", help="write the dummy model there, and end")
    options = parser.parse_args()
    if options.write_model:
        print(write_model(options.write_model))
        return 0
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / NAME)
        servers = [dummy_server(model, engine) for engine in options.engines.split(",")]
        targets = [server.__enter__() for server in servers]
        try:
            for server in servers:
                print(f"{server.name}: ready after {server.seconds_to_ready:.1f} s")
            if options.against:
                targets.append(Target("the other", options.against, options.against_model, options.against_pid))
            streams = [int(number) for number in options.streams.split(",")]
            return 1 if compare(targets, streams, options.rounds, options.scale) else 0
        finally:
            for server in servers:
                server.__exit__()


if __name__ == "__main__":
    sys.exit(main())
