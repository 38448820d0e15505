"""`headrace bench throughput`: all prompts at once, in this process, without a server."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from app.bench.offline import open_llm, write_json
from app.config.settings import Settings, SettingsError
from app.workload.datasets import add_dataset_flags, draw_requests, text_of, token_ids_of
from app.workload.report import output_file
from engine.messages import SamplingParams


def add_flags(parser: ArgumentParser) -> None:
    """Those of vLLM's `bench throughput`."""
    add_dataset_flags(parser)
    group = parser.add_argument_group("run")
    group.add_argument("--n", type=int, default=1, metavar="N", help="Answers to each prompt. Default: 1.")
    group.add_argument("--output-json", type=output_file, metavar="FILE", help="Write the result.")


def run(settings: Settings, *, n: int, output_json: Path | None, **given: Any) -> int:
    """Prompts are token ids, or the texts of a file; answers end at their length."""
    options = Namespace(**given)
    if options.dataset_name == "conversation":
        raise SettingsError("--dataset-name: conversations need a server; try headrace bench serve")
    if n < 1:
        raise SettingsError(f"--n: got {n}; allowed: at least 1")
    requests = draw_requests(options, seed=settings.seed or 0)
    llm = open_llm(settings)
    vocab_size = llm.core.executor.vocab_size
    prompts: list[str | list[int]] = [
        token_ids_of(request, vocab_size) if request.text is None else text_of(request) for request in requests
    ]
    sampling = [SamplingParams(n=n, ignore_eos=True, max_tokens=request.num_output_tokens) for request in requests]
    started = time.perf_counter()
    results = llm.generate(prompts, sampling)
    seconds = time.perf_counter() - started
    num_input = sum(len(result.prompt_token_ids) for result in results)
    num_output = sum(len(choice.token_ids) for result in results for choice in result.choices)
    print(
        f"Throughput: {len(requests) / seconds:.2f} requests/s, {(num_input + num_output) / seconds:,.1f} total "
        f"tokens/s, {num_output / seconds:,.1f} output tokens/s"
    )
    print(f"Prompt tokens: {num_input:,}\nOutput tokens: {num_output:,}")
    num_asked = n * sum(request.num_output_tokens for request in requests)
    if num_output < num_asked:
        print(
            f"Answers were cut at the context of {llm.core.config.max_model_len:,} tokens (max_model_len): "
            f"{num_asked:,} output tokens were asked for."
        )
    write_json(
        output_json,
        {
            "model_id": settings.model,
            "elapsed_time": seconds,
            "num_requests": len(requests),
            "total_num_tokens": num_input + num_output,
            "requests_per_second": len(requests) / seconds,
            "tokens_per_second": (num_input + num_output) / seconds,
            "total_output_tokens": num_output,
            "requested_output_tokens": num_asked,
            "output_tokens_per_second": num_output / seconds,
        },
    )
    return 0
