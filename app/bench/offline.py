"""`headrace bench latency`, `throughput` and `startup`: the model in this process, and starts of a server."""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from pydantic import ByteSize, SecretStr
from rich.console import Console
from rich.progress import track

from app.client import ServerClient, ServerError
from app.config.settings import Settings, SettingsError
from app.config.sources import Given, check_settings, env_name, shown
from app.library import LLM
from app.workload.datasets import add_dataset_flags, check_positive, draw_requests, text_of, token_ids_of
from app.workload.report import output_file
from engine.messages import SamplingParams
from gpu.checkpoint import open_model, weight_paths

PERCENTILES = (10, 25, 50, 75, 90, 99)
POLL_SECONDS = 0.01
LONGEST_START = 600.0  # seconds
PHASES = {"answer": "first answer", "startup": "ready", "first_token": "first token"}


def add_latency_flags(parser: ArgumentParser) -> None:
    add = partial(parser.add_argument_group("batch").add_argument, type=int, metavar="N")
    add("--input-len", default=32, help="Prompt tokens. Default: 32.")
    add("--output-len", default=128, help="Tokens of each answer. Default: 128.")
    add("--batch-size", default=8, help="Prompts. Default: 8.")
    add("--n", default=1, help="Answers to each prompt. Default: 1.")
    add("--num-iters-warmup", default=10, help="Batches before the measured ones. Default: 10.")
    add("--num-iters", default=30, help="Measured batches. Default: 30.")
    parser.add_argument("--output-json", type=output_file, metavar="FILE", help="Write the result.")


def latency(settings: Settings, **given: Any) -> int:
    """Time one batch, again and again. The prefix cache is off unless a setting turns it on."""
    options = Namespace(**given)
    check_positive(options, "input_len", "output_len", "batch_size", "n", "num_iters")
    input_len, output_len = options.input_len, options.output_len
    llm = open_llm(settings, enable_prefix_caching=False, max_num_seqs=options.batch_size * options.n)
    if input_len + output_len > (longest := llm.core.config.max_model_len):
        raise SettingsError(
            f"--output-len: got {output_len} and {input_len} prompt tokens; allowed: {longest} in sum (max_model_len)"
        )
    draw = random.Random(settings.seed or 0)
    ids = range(llm.core.executor.vocab_size)
    prompts: list[str | list[int]] = [draw.choices(ids, k=input_len) for _ in range(options.batch_size)]
    sampling = SamplingParams(n=options.n, ignore_eos=True, max_tokens=output_len)
    latencies = []
    console = Console(stderr=True)
    rounds = range(options.num_iters_warmup + options.num_iters)
    for _ in track(rounds, "batches", console=console, disable=not console.is_terminal, transient=True):
        started = time.perf_counter()
        llm.generate(prompts, sampling, progress=False)
        latencies.append(time.perf_counter() - started)
    latencies = latencies[options.num_iters_warmup :]
    mean, percentiles = statistics.fmean(latencies), percentiles_of(latencies)
    num_tokens = options.batch_size * options.n * output_len
    print(f"Mean latency: {mean:.4f} s, {num_tokens / mean:,.1f} output tokens/s")
    for percent, seconds in percentiles.items():
        print(f"p{percent}: {seconds:.4f} s")
    result = {"model_id": settings.model, "avg_latency": mean, "latencies": latencies, "percentiles": percentiles}
    write_json(options.output_json, result)
    return 0


def add_throughput_flags(parser: ArgumentParser) -> None:
    add_dataset_flags(parser)
    group = parser.add_argument_group("run")
    group.add_argument("--n", type=int, default=1, metavar="N", help="Answers to each prompt. Default: 1.")
    group.add_argument("--output-json", type=output_file, metavar="FILE", help="Write the result.")


def throughput(settings: Settings, *, n: int, output_json: Path | None, **given: Any) -> int:
    """Generate for all prompts at once: random token ids, or the texts of a file. EOS does not end answers."""
    options = Namespace(n=n, **given)
    if options.dataset_name == "conversation":
        raise SettingsError("--dataset-name: conversations need a server; try headrace bench serve")
    check_positive(options, "n")
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
    num_asked = n * sum(request.num_output_tokens for request in requests)
    result = {
        "model_id": settings.model,
        "elapsed_time": seconds,
        "num_requests": len(requests),
        "total_num_tokens": num_input + num_output,
        "requests_per_second": len(requests) / seconds,
        "tokens_per_second": (num_input + num_output) / seconds,
        "total_output_tokens": num_output,
        "requested_output_tokens": num_asked,
        "output_tokens_per_second": num_output / seconds,
    }
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, {result['tokens_per_second']:,.1f} total "
        f"tokens/s, {result['output_tokens_per_second']:,.1f} output tokens/s"
    )
    print(f"Prompt tokens: {num_input:,}\nOutput tokens: {num_output:,}")
    if num_output < num_asked:
        print(
            f"Answers were cut at the context of {llm.core.config.max_model_len:,} tokens (max_model_len): "
            f"{num_asked:,} output tokens were asked for."
        )
    write_json(output_json, result)
    return 0


def add_startup_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("starts")
    group.add_argument("--num-iters-cold", type=int, default=3, metavar="N", help="Default: 3.")
    group.add_argument(
        "--num-iters-warmup", type=int, default=1, metavar="N", help="Starts before the warm ones. Default: 1."
    )
    group.add_argument("--num-iters-warm", type=int, default=3, metavar="N", help="Default: 3.")
    group.add_argument("--output-json", type=output_file, metavar="FILE", help="Write the result.")


def startup(
    settings: Settings, *, num_iters_cold: int, num_iters_warmup: int, num_iters_warm: int, output_json: Path | None
) -> int:
    """Measure starts of a server, after fetching the model if it is missing: from exec to its first answer, to ready,
    to the first token.

    Cold: there are no compiled Python files or kernels, and the weights are not in the page cache, as far as a user can
    evict them. Warm: a start after another one.
    """
    weights = weight_paths(
        open_model(settings.model_source, cache_dir=settings.cache_dir, load_format=settings.load_format)
    )
    taken: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(num_iters_cold):
        with TemporaryDirectory() as empty:
            _put_out_of_memory(weights)
            caches = ("PYTHONPYCACHEPREFIX", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
            taken["cold"].append(_start(settings, dict.fromkeys(caches, empty)))
    for _ in range(num_iters_warmup):
        _start(settings, {})
    taken["warm"] = [_start(settings, {}) for _ in range(num_iters_warm)]
    result: dict[str, Any] = {}
    for kind, starts in taken.items():
        for phase, title in PHASES.items():
            if times := [start[phase] for start in starts]:
                result[f"avg_{kind}_{phase}_time"] = statistics.fmean(times)
                result[f"{kind}_{phase}_times"] = times
                result[f"{kind}_{phase}_percentiles"] = percentiles_of(times)
                print(
                    f"{kind}, exec to {title}: {statistics.fmean(times):.2f} s ({min(times):.2f} to {max(times):.2f})"
                )
    write_json(output_json, {"model_id": settings.model, **result})
    return 0


def _start(settings: Settings, environment: dict[str, str]) -> dict[str, float]:
    """Return seconds from exec to each phase. Raises SettingsError if the server ends earlier."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {env_name(name): _text(getattr(settings, name)) for name in settings.model_fields_set}
    given |= {env_name("host"): "127.0.0.1", env_name("port"): str(port), env_name("log_level"): "error"}
    given["PYTHONDONTWRITEBYTECODE"] = ""  # an installed server has its compiled files
    key = settings.api_keys[0].get_secret_value() if settings.api_keys else None
    client = ServerClient(f"http://127.0.0.1:{port}", key, timeout=LONGEST_START)
    reached: dict[str, float] = {}
    began = time.perf_counter()
    command = [sys.executable, "-m", "app.commands.cli", "serve"]
    with subprocess.Popen(command, env=os.environ | given | environment, stdout=subprocess.DEVNULL) as server:  # noqa: S603
        try:
            while "startup" not in reached:
                status = _status(client)
                now = time.perf_counter() - began
                if status:
                    reached.setdefault("answer", now)
                if status == 200:
                    reached["startup"] = now
                elif server.poll() is not None or now > LONGEST_START:
                    raise SettingsError("The server did not become ready; its last messages are above.")
                else:
                    time.sleep(POLL_SECONDS)
            body = {"model": settings.model_names[0], "prompt": "Once upon a time", "max_tokens": 1}
            with client.request("POST", "/v1/completions", body) as answer:
                answer.read()
            reached["first_token"] = time.perf_counter() - began
        finally:
            server.terminate()
    return reached


def _status(client: ServerClient) -> int:
    """Return the status of /readyz; 0 without an answer."""
    with suppress(ServerError), client.request("GET", "/readyz", check=False) as answer:
        return answer.status
    return 0


def _put_out_of_memory(files: Sequence[Path]) -> None:
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _text(value: object) -> str:
    """Return a setting's value in the form of its environment variable."""
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, dict):
        return json.dumps(value)
    return str(int(value)) if isinstance(value, ByteSize) else shown(value)  # `shown` rounds sizes


def open_llm(settings: Settings, **unless_given: Any) -> LLM:
    """Load the model with these settings; `unless_given` are defaults for settings that were not given."""
    given = {name: value for name, value in unless_given.items() if name not in settings.model_fields_set}
    given |= {name: getattr(settings, name) for name in settings.model_fields_set}
    return LLM.of(check_settings({name: Given(value, name) for name, value in given.items()}))


def percentiles_of(seconds: list[float]) -> dict[str, float]:
    """Return percentiles by percent, as vLLM's benchmarks write them."""
    return dict(zip(map(str, PERCENTILES), np.percentile(seconds, PERCENTILES).tolist(), strict=True))


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"Result: {path}")
