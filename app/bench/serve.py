"""`headrace bench serve`: a workload against any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import math
import os
import platform
import re
import shlex
import signal
import sys
import time
import uuid
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from app.bench.driver import Driver
from app.client import ConnectionPool, allow_open_files
from app.config.settings import Settings, SettingsError
from app.config.sources import env_name
from app.simulate.driver import simulate
from app.simulate.machine import Machine, machine_of, read_machine, table_facts
from app.workload.datasets import WorkloadRequest, add_workload_flags, check_positive, workload
from app.workload.report import METRICS, RequestRecord, output_file, parse_goodput, per_request, statistics, summarize
from engine.messages import MAX_N
from gpu.host import processor_name, usable_cores

# The path that each of vLLM's backends calls. Both are OpenAI's API, which many servers offer.
ENDPOINTS = {
    **dict.fromkeys(("openai", "vllm", "sglang", "lmdeploy", "llama.cpp"), "/v1/completions"),
    **dict.fromkeys(("openai-chat", "vllm-chat"), "/v1/chat/completions"),
}
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of vLLM's `bench serve` and our own."""
    server = parser.add_argument_group("server")
    add = partial(server.add_argument, default=None)
    add("--backend", choices=list(ENDPOINTS), default="openai", help="Which API. Default: openai.")
    add("--base-url", metavar="URL", help="Where the server is, http or https. Default: --host and --port.")
    add("--host", default="127.0.0.1", help="Default: 127.0.0.1.")
    add("--port", type=int, default=8000, help="Default: 8000.")
    add("--endpoint", metavar="PATH", help="Default: /v1/completions or /v1/chat/completions, by --backend.")
    add("--header", metavar="KEY=VALUE", nargs="*", default=[], help="Sent with each request.")
    add("--model", help="Default: the first that the server lists.")
    add("--tokenizer", metavar="X", help="Accepted for vLLM's scripts; has no effect, since no tokenizer is needed.")
    add("--served-model-name", metavar="NAME", help="The model's name in the API. Default: --model.")
    add("--insecure", action="store_true", default=False, help="Do not verify the certificate.")
    add("--ready-check-timeout-sec", type=float, default=0.0, metavar="S",
        help="Seconds to wait for a server that is still starting. Default: 0.")  # fmt: skip
    add_workload_flags(parser)
    load = parser.add_argument_group("load")
    add = partial(load.add_argument, default=None)
    add("--max-concurrency", type=int, metavar="N", help="Requests at a time. Default: no limit.")
    add("--num-warmups", type=int, default=0, metavar="N", help="Requests before the run that do not count.")
    add("--request-timeout", type=float, default=3600.0, metavar="S",
        help="A request fails after S seconds. Default: 3600.")  # fmt: skip
    add("--seed", type=int, default=0, help="Seed of the workload. Default: 0.")
    add("--request-id-prefix", metavar="TEXT", help="Prefix of each request's x-request-id. Default: random.")
    body = parser.add_argument_group("request")
    add = partial(body.add_argument, default=None)
    add("--ignore-eos", action="store_true", default=False,
        help="Do not end answers at EOS. Always set with random prompts.")  # fmt: skip
    add("--logprobs", type=int, metavar="N", help="Log-probabilities per token.")
    for name in SAMPLING:
        kind = int if name == "top_k" else float
        add(f"--{name.replace('_', '-')}", type=kind, metavar="X", help="Default: the server's.")
    add("--extra-body", type=_json_object, default={}, metavar="JSON", help="More fields of each request.")
    result = parser.add_argument_group("result")
    add = partial(result.add_argument, default=None)
    add("--percentile-metrics", default="ttft,tpot,itl,e2el", metavar="LIST", help="Default: ttft,tpot,itl,e2el.")
    add("--metric-percentiles", default="50,90,99", metavar="LIST", help="Default: 50,90,99.")
    add("--goodput", nargs="+", default=[], metavar="KEY:MS", help="Objectives, such as ttft:500 tpot:50 e2el:5000.")
    add("--save-result", action="store_true", default=False, help="Write the result as JSON.")
    add("--save-detailed", action="store_true", default=False,
        help="Write the result with lists of figures per request.")  # fmt: skip
    add("--append-result", action="store_true", default=False, help="Add to the file instead of replacing it.")
    add("--result-dir", type=Path, default=Path(), metavar="DIR", help="Default: the current one.")
    add("--result-filename", metavar="NAME", help="Default: backend, rate, model and time.")
    add("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="Kept with the result.")
    add("--label", help="Prefix of the file name. Default: the backend.")
    add("--html", type=output_file, metavar="FILE", help="Write a page with plots.")
    add("--compare", type=Path, metavar="FILE", help="Compare this run with an earlier one: a file of --save-result.")
    add("--predict", nargs="?", const="", metavar="FILE",
        help="Add the simulator's figures for the same workload. Step costs come from /server_info, read with the "
        "key in HEADRACE_ADMIN_KEYS, or from a file.")  # fmt: skip
    add("--disable-tqdm", action="store_true", default=False, help="Show no progress.")


def run(**given: Any) -> int:
    """Return exit code 0, or 1 if no request succeeded. Raises SettingsError for flags that exclude each other."""
    import uvloop

    from app.workload.rendering import page, print_result, progress

    options = Namespace(**given)
    check = _Checked(options)
    requests = workload(options, seed=options.seed)
    with progress(len(requests), shown=not options.disable_tqdm) as on_answer:
        records, more, simulated = uvloop.run(_measure(options, check, requests, on_answer))
    result = _conditions(options, check) | summarize(
        records, metrics=check.metrics, percentiles=check.percentiles, slo=check.slo, began=more.pop("began")
    )
    result |= more
    if simulated is not None and "stopped_by" not in result:
        machine, settings = simulated
        requests = [replace(request, n=check.n) for request in requests]
        result |= predict(requests, machine, settings, result, options.max_concurrency)
    if options.save_result or options.append_result or options.save_detailed:  # before anything can fail
        print(f"Result: {_save(options, result | (per_request(records) if options.save_detailed else {}))}", flush=True)
    print_result(result, check.beside)
    if options.html:
        options.html.write_text(page(result, records, check.beside), encoding="utf-8")
        print(f"Plots: {options.html}")
    return 128 + result["stopped_by"] if "stopped_by" in result else 0 if result["completed"] else 1


class _Checked:
    """Parsed values of flags that hold lists or pairs. Raises SettingsError."""

    def __init__(self, options: Namespace) -> None:
        self.slo = parse_goodput(options.goodput)
        self.metrics = options.percentile_metrics.split(",")
        try:
            self.percentiles = [float(part) for part in options.metric_percentiles.split(",")]
        except ValueError:
            self.percentiles = [-1.0]
        self.headers = dict(_pairs("--header", options.header, "="))
        self.metadata = dict(_pairs("--metadata", options.metadata, "="))
        if wrong := [name for name in self.metrics if name not in METRICS]:
            raise SettingsError(f"--percentile-metrics: got {wrong[0]!r}; allowed: {', '.join(METRICS)}")
        if not all(0 <= percent <= 100 for percent in self.percentiles):
            raise SettingsError(
                f"--metric-percentiles: got {options.metric_percentiles}; allowed: 0 to 100, such as 50,90,99"
            )
        self.n = options.extra_body.get("n") or 1
        if options.predict is not None and self.n not in range(1, MAX_N + 1):
            raise SettingsError(f"--extra-body: got n={self.n!r}; allowed with --predict: 1 to {MAX_N}")
        self.beside = None if options.compare is None else _read_result(options.compare)
        if options.max_concurrency is not None:
            check_positive(options, "max_concurrency")
        if not 0 < options.request_timeout < math.inf:
            raise SettingsError(f"--request-timeout: got {options.request_timeout}; allowed: seconds, more than 0")
        if options.save_result or options.append_result or options.save_detailed:
            _check_results(options.result_dir, options.result_filename)
        if (key := os.environ.get("OPENAI_API_KEY")) and "authorization" not in map(str.lower, self.headers):
            self.headers["Authorization"] = f"Bearer {key}"
        for name, value in [*self.headers.items(), ("x-request-id", options.request_id_prefix or "")]:
            if not (name + value).isascii() or not (name + value).isprintable():  # the value may be a secret
                raise SettingsError(f"--header: {name!r} has characters that cannot be sent; allowed: printable ASCII")


def _check_results(folder: Path, name: str | None) -> None:
    path = folder / (name or "result.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--result-dir: cannot make {path.parent}: {error.strerror}") from None
    if path.is_dir():
        raise SettingsError(f"--result-filename: got {path}; allowed: a file")


async def _measure(
    options: Namespace, check: _Checked, requests: Sequence[WorkloadRequest], on_answer: Callable[[RequestRecord], None]
) -> tuple[list[RequestRecord], dict[str, Any], Any]:
    """Return the records, further figures of the run, and the machine and settings that `--predict` simulates."""
    allow_open_files()
    url = options.base_url or f"http://{options.host}:{options.port}"
    pool = ConnectionPool(url, check.headers, verify=not options.insecure, timeout=options.request_timeout)
    await _wait_until_ready(pool, options.ready_check_timeout_sec)
    simulated = None if options.predict is None else await simulated_machine(pool, options.predict)
    model = options.served_model_name or options.model or await _first_model(pool)
    ignore_eos = options.ignore_eos or options.dataset_name in ("random", "prefix_repetition", "conversation")
    fields = {name: value for name in (*SAMPLING, "logprobs") if (value := getattr(options, name)) is not None}
    fields = {"model": model} | fields | ({"ignore_eos": True} if ignore_eos else {}) | options.extra_body
    path = options.endpoint or ENDPOINTS[options.backend]
    prefix = options.request_id_prefix or f"bench-{uuid.uuid4().hex[:8]}-"
    if options.num_warmups > 0:
        warmups = [replace(requests[0], arrival=0.0)] * options.num_warmups
        await Driver(pool, path, fields, max_concurrency=options.max_concurrency).run(warmups)
        simulated = None if options.predict is None else await simulated_machine(pool, options.predict)
    driver = Driver(pool, path, fields, max_concurrency=options.max_concurrency, id_prefix=prefix, on_answer=on_answer)
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(RuntimeError, ValueError):  # not the main thread
            asyncio.get_running_loop().add_signal_handler(number, driver.stop, number)
    records = await driver.run(requests)
    version = await pool.get_json("/version")
    more = (
        {"model_id": model, "began": driver.figures.began}
        | ({"stopped_by": driver.stopped_by} if driver.stopped_by else {})
        | {"server": f"{url}, version {version.get('version')}" if isinstance(version, dict) else url}
        | driver.figures.summary()
        | await compare_with_server(pool, records)
    )
    pool.close()
    return records, more, simulated


async def _wait_until_ready(pool: ConnectionPool, seconds: float) -> None:
    """Wait until the server lists its models. Raises SettingsError if it does not listen in time."""
    given_up = time.monotonic() + seconds
    while True:
        late = time.monotonic() >= given_up
        try:
            await pool.open(1)
            if late or await pool.get_json("/v1/models") is not None:
                return
        except SettingsError:
            if late:
                raise
        await asyncio.sleep(min(0.5, max(0.0, given_up - time.monotonic())))


async def _first_model(pool: ConnectionPool) -> str:
    answer = await pool.get_json("/v1/models")
    try:
        return str(answer["data"][0]["id"])
    except (TypeError, LookupError) as error:
        raise SettingsError("--model: the server lists none at /v1/models; give the name") from error


def _conditions(options: Namespace, check: _Checked) -> dict[str, Any]:
    """Return the conditions of the run, as vLLM's client writes them."""
    names = ["burstiness", "max_concurrency", "num_prompts", "dataset_name", "seed"]
    if options.ramp_up_strategy is not None:
        names += ["ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"]
    return {
        "date": f"{datetime.now():%Y%m%d-%H%M%S}",
        "command": _command_line(options.header),
        "machine": f"{processor_name() or platform.machine()}, {usable_cores()} cores, load {os.getloadavg()[0]:.1f}",
        **dict.fromkeys(("endpoint_type", "backend"), options.backend),
        "label": options.label,
        "tokenizer_id": options.tokenizer,
        **check.metadata,
        "request_rate": options.request_rate if options.request_rate < math.inf else "inf",
        **{name: getattr(options, name) for name in names},
        "n": check.n,
    }


def _command_line(headers: Sequence[str]) -> str:
    """Return the command line, without what may be secret: values of headers, and passwords in URLs."""
    words = []
    for word in sys.argv[1:]:
        name, found, _ = word.partition("=") if word in headers else word.partition("\0")
        if word.startswith("--header="):
            name, found = word.rpartition("=")[0], "="
        words.append(re.sub("://[^/@]*@", "://...@", f"{name}=..." if found else word))
    return shlex.join(["headrace", *words])


def _read_result(path: Path) -> dict[str, Any]:
    from app.workload.rendering import page

    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
        page(result, (), result)  # before the run, which would be lost
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        pass
    else:
        return result
    raise SettingsError(f"--compare: got {path}; allowed: a file that --save-result has written")


def _save(options: Namespace, result: dict[str, Any]) -> Path:
    """Write JSON on one line to the file that vLLM's client would name, and return its path."""
    load = f"{options.request_rate}qps"
    if options.ramp_up_strategy is not None:
        load = f"ramp-up-{options.ramp_up_strategy}-{options.ramp_up_start_rps}qps-{options.ramp_up_end_rps}qps"
    if options.max_concurrency is not None:
        load += f"-concurrency{options.max_concurrency}"
    model = result["model_id"].rpartition("/")[2]
    name = options.result_filename or f"{options.label or options.backend}-{load}-{model}-{result['date']}.json"
    path: Path = options.result_dir / name
    with path.open("a" if options.append_result else "w", encoding="utf-8") as file:
        file.write("\n" * (file.tell() > 0) + json.dumps(result))
    return path


def _pairs(flag: str, given: Sequence[str], separator: str) -> list[tuple[str, str]]:
    parts = [text.partition(separator) for text in given]
    if wrong := [text for text, (_, found, _) in zip(given, parts, strict=True) if not found]:
        raise SettingsError(f"{flag}: got {wrong[0]!r}; allowed: KEY{separator}VALUE")
    return [(key.strip(), value.strip()) for key, _, value in parts]


def _json_object(text: str) -> dict[str, Any]:
    try:
        if isinstance(fields := json.loads(text), dict):
            return fields
    except ValueError:
        pass
    raise ArgumentTypeError(f'got {text!r}; allowed: a JSON object, such as {{"guided_regex": "a+"}}')


# -------------------------------------------------------------------------------------------------------------- predict
# `--predict`: the simulator's figures for the same workload, and their errors.


COMPARED = (
    *("duration", "request_throughput", "output_throughput", "max_concurrent_requests", "total_cached_tokens"),
    *(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for kind in ("median", "p90", "p99")),
)


async def simulated_machine(pool: ConnectionPool, file: str) -> tuple[Machine, Settings]:
    """Return the machine and settings of the file, or else those that the server reports now. Raises SettingsError."""
    if file:
        return read_machine(Path(file), Settings(), flag="--predict")
    admin_key = os.environ.get(env_name("admin_keys"), "").partition(",")[0]
    headers = {"authorization": f"Bearer {admin_key}"} if admin_key else None
    server_info = await pool.get_json("/server_info", headers)
    if not isinstance(server_info, dict) or not server_info.get("step_cost"):
        raise SettingsError(
            "--predict: the server does not report its step costs. Headrace reports them at /server_info to holders of "
            "an admin key: put one of its admin_keys into HEADRACE_ADMIN_KEYS, or give --predict FILE with the answer"
        )
    try:
        return machine_of(server_info, Settings())
    except ValueError as error:
        raise SettingsError(f"--predict: the server's /server_info cannot be used: {error}") from None


def predict(
    requests: Sequence[WorkloadRequest],
    machine: Machine,
    settings: Settings,
    result: Mapping[str, Any],
    max_concurrency: int | None,
) -> dict[str, Any]:
    """Return `predicted`, by key of the result, `prediction_error` (predicted over measured, minus 1), and facts about
    the step costs."""
    outcome = simulate(requests, machine, settings, max_concurrency=max_concurrency)
    simulated = outcome.result(percentiles=(90, 99), began=0.0)
    predicted = {key: simulated[key] for key in COMPARED}
    errors = {key: value / result[key] - 1 for key, value in predicted.items() if result.get(key)}
    steps = {name: outcome.figures[name] for name in ("has_spread", "unmeasured")}
    return {"predicted": predicted, "prediction_error": errors, "predicted_from": table_facts(machine.table)} | steps


# ------------------------------------------------------------------------------------------------------------ timelines
# Comparison with the timelines of a Headrace server: where the time went, and where client and server disagree.


REMEMBERED = 1000  # timelines that a server may keep
MAX_LOOKUPS = 200  # of a run, evenly spread over those
_BEFORE_FIRST_TOKEN = ("receive", "tokenize", "queue", "prefill")


async def compare_with_server(pool: ConnectionPool, records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the client's TTFT and end-to-end latency minus the server's, and the server's time in each segment. Return
    nothing if the server keeps no timelines.

    The difference of TTFT is the network, the sending and what the client itself adds.
    """
    done = [record for record in records if not record.error][-REMEMBERED:]
    overheads: dict[str, list[float]] = {"ttft_overhead": [], "e2el_overhead": []}
    segments: dict[str, list[float]] = {}
    disagreeing = 0
    for record in done[:: -(-len(done) // MAX_LOOKUPS) or 1]:
        timeline = await pool.get_json(f"/v1/requests/{quote(record.request_id, safe='')}/timeline")
        try:
            seconds = {str(segment["name"]): float(segment["seconds"]) for segment in timeline["segments"]}
            whole, num_output_tokens = float(timeline["seconds"]), timeline["output_tokens"]
        except (TypeError, LookupError, ValueError):
            break  # another kind of server, or the timeline is no longer kept
        overheads["ttft_overhead"].append(record.ttft - sum(seconds.get(name, 0.0) for name in _BEFORE_FIRST_TOKEN))
        overheads["e2el_overhead"].append(record.end_time - record.start_time - whole)
        disagreeing += num_output_tokens != record.num_output_tokens
        for name, value in seconds.items():
            segments.setdefault(name, []).append(value)
    compared = len(overheads["ttft_overhead"])
    if not compared:
        return {}
    result: dict[str, Any] = {"timelines_compared": compared, "timelines_with_other_token_counts": disagreeing}
    for name, values in (overheads | {f"server_{name}": values for name, values in segments.items()}).items():
        result |= statistics(name, values)
    return result
