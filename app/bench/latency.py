"""`headrace bench latency`: how long one batch takes, again and again, in this process."""

from __future__ import annotations

import random
import statistics
import time
from argparse import ArgumentParser
from pathlib import Path

from rich.console import Console
from rich.progress import track

from app.bench.offline import open_llm, percentiles_of, write_json
from app.config.settings import Settings, SettingsError
from app.workload.report import output_file
from engine.messages import SamplingParams


def add_flags(parser: ArgumentParser) -> None:
    """Those of vLLM's `bench latency`."""
    group = parser.add_argument_group("batch")
    group.add_argument("--input-len", type=int, default=32, metavar="N", help="Prompt tokens. Default: 32.")
    group.add_argument("--output-len", type=int, default=128, metavar="N", help="Tokens of each answer. Default: 128.")
    group.add_argument("--batch-size", type=int, default=8, metavar="N", help="Prompts. Default: 8.")
    group.add_argument("--n", type=int, default=1, metavar="N", help="Answers to each. Default: 1.")
    group.add_argument("--num-iters-warmup", type=int, default=10, metavar="N", help="Do not count. Default: 10.")
    group.add_argument("--num-iters", type=int, default=30, metavar="N", help="Default: 30.")
    group.add_argument("--output-json", type=output_file, metavar="FILE", help="Write the result.")


def run(
    settings: Settings,
    *,
    input_len: int,
    output_len: int,
    batch_size: int,
    n: int,
    num_iters_warmup: int,
    num_iters: int,
    output_json: Path | None,
) -> int:
    """No prompt comes twice to the prefix cache, which is off unless it is asked for."""
    sizes = {"input-len": input_len, "output-len": output_len, "batch-size": batch_size, "n": n, "num-iters": num_iters}
    for name, value in sizes.items():
        if value < 1:
            raise SettingsError(f"--{name}: got {value}; allowed: at least 1")
    llm = open_llm(settings, enable_prefix_caching=False, max_num_seqs=batch_size * n)
    if input_len + output_len > (longest := llm.core.config.max_model_len):
        raise SettingsError(
            f"--output-len: got {output_len} and {input_len} prompt tokens; allowed: {longest} in sum (max_model_len)"
        )
    draw = random.Random(settings.seed or 0)
    ids = range(llm.core.executor.vocab_size)
    prompts: list[str | list[int]] = [draw.choices(ids, k=input_len) for _ in range(batch_size)]
    sampling = SamplingParams(n=n, ignore_eos=True, max_tokens=output_len)
    latencies = []
    console = Console(stderr=True)
    rounds = range(num_iters_warmup + num_iters)
    for _ in track(rounds, "batches", console=console, disable=not console.is_terminal, transient=True):
        started = time.perf_counter()
        llm.generate(prompts, sampling, progress=False)
        latencies.append(time.perf_counter() - started)
    latencies = latencies[num_iters_warmup:]
    mean = statistics.fmean(latencies)
    percentiles = percentiles_of(latencies)
    print(f"Mean latency: {mean:.4f} s, {batch_size * n * output_len / mean:,.1f} output tokens/s")
    for percent, seconds in percentiles.items():
        print(f"p{percent}: {seconds:.4f} s")
    result = {"model_id": settings.model, "avg_latency": mean, "latencies": latencies, "percentiles": percentiles}
    write_json(output_json, result)
    return 0
