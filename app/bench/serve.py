"""`headrace bench serve`: a workload against any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
import uuid
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
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
from app.simulate.machine import Machine, machine_of, read_machine
from app.workload.datasets import WorkloadRequest, add_workload_flags, workload
from app.workload.report import METRICS, SLO_METRICS, RequestRecord, output_file, per_request, statistics, summarize

# What each backend of vLLM's asks. Both are OpenAI's API, which many servers speak.
ENDPOINTS = {
    **dict.fromkeys(("openai", "vllm", "sglang", "lmdeploy", "llama.cpp"), "/v1/completions"),
    **dict.fromkeys(("openai-chat", "vllm-chat"), "/v1/chat/completions"),
}
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
# Of vLLM's client, which needs a tokenizer. Scripts that give them go on working.
IGNORED = ("--tokenizer", "--tokenizer-mode")
IGNORED_SWITCHES = ("--trust-remote-code", "--skip-tokenizer-init")


def add_flags(parser: ArgumentParser) -> None:
    """Those of vLLM's, and `--html` and `--request-timeout`."""
    server = parser.add_argument_group("server")
    add = partial(server.add_argument, default=None)
    add("--backend", "--endpoint-type", choices=list(ENDPOINTS), default="openai", help="Which API. Default: openai.")
    add("--base-url", metavar="URL", help="Where the server is, http or https. Default: --host and --port.")
    add("--host", default="127.0.0.1", help="Default: 127.0.0.1.")
    add("--port", type=int, default=8000, help="Default: 8000.")
    add("--endpoint", metavar="PATH", help="Default: /v1/completions or /v1/chat/completions, by --backend.")
    add("--header", metavar="KEY=VALUE", nargs="*", default=[], help="Sent with each request.")
    add("--model", help="Default: the first that the server names.")
    add("--served-model-name", metavar="NAME", help="What the API calls --model.")
    add("--insecure", action="store_true", default=False, help="Do not verify the certificate.")
    add("--ready-check-timeout-sec", type=float, default=0.0, metavar="S",
        help="Wait for so long until the server has started. Default: 0.")  # fmt: skip
    add_workload_flags(parser)
    load = parser.add_argument_group("load")
    add = partial(load.add_argument, default=None)
    add("--max-concurrency", type=int, metavar="N", help="Requests under way at a time. Default: no limit.")
    add("--num-warmups", type=int, default=0, metavar="N", help="Requests before the run that do not count.")
    add("--request-timeout", type=float, default=3600.0, metavar="S", help="A request fails after it. Default: 3600.")
    add("--seed", type=int, default=0, help="Of the workload. Default: 0.")
    add("--request-id-prefix", metavar="TEXT", help="Of the x-request-id of each request. Default: drawn.")
    body = parser.add_argument_group("request")
    add = partial(body.add_argument, default=None)
    add("--ignore-eos", action="store_true", default=False, help="Answers end at their length. So with random prompts.")
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
    add("--save-detailed", action="store_true", default=False, help="With lists of what each request saw.")
    add("--append-result", action="store_true", default=False, help="Add to the file instead of replacing it.")
    add("--result-dir", type=Path, default=Path(), metavar="DIR", help="Default: here.")
    add("--result-filename", metavar="NAME", help="Default: made of backend, rate, model and time.")
    add("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="Kept with the result.")
    add("--label", help="Begins the file's name. Default: the backend.")
    add("--html", type=output_file, metavar="FILE", help="Write a page with plots.")
    add("--predict", nargs="?", const="", metavar="FILE",
        help="Add what the simulator says of the same workload, from the step costs that the server tells at "
        "/server_info to the key in HEADRACE_ADMIN_KEYS, or of a file with that.")  # fmt: skip
    add("--disable-tqdm", action="store_true", default=False, help="Show no progress.")
    ignored = parser.add_argument_group("accepted without effect")
    for name in IGNORED:
        ignored.add_argument(name, metavar="X", help="No tokenizer is needed here.")
    for name in IGNORED_SWITCHES:
        ignored.add_argument(name, action="store_true")


def run(**given: Any) -> int:
    """Exit code 0, or 1 if nothing was answered. Raises SettingsError for flags that make no sense together."""
    import uvloop

    from app.workload.rendering import print_result, progress

    options = Namespace(**given)
    check = _Checked(options)
    requests = workload(options, seed=options.seed)
    with progress(len(requests), shown=not options.disable_tqdm) as on_answer:
        records, more, simulated = uvloop.run(_measure(options, check, requests, on_answer))
    result = _conditions(options, check) | summarize(
        records, metrics=check.metrics, percentiles=check.percentiles, slo=check.slo, began=more.pop("began")
    )
    result |= more
    if simulated is not None:
        machine, settings = simulated
        result |= predict(requests, machine, settings, result, options.max_concurrency)
    print_result(result)
    if options.html:
        from app.workload.rendering import page

        options.html.write_text(page(result, records), encoding="utf-8")
        print(f"Plots: {options.html}")
    if options.save_result or options.append_result or options.save_detailed:
        print(f"Result: {_save(options, result | (per_request(records) if options.save_detailed else {}))}")
    return 0 if result["completed"] else 1


class _Checked:
    """What is written in one flag and means several things. Raises SettingsError."""

    def __init__(self, options: Namespace) -> None:
        self.slo = {name: _number("--goodput", value) for name, value in _pairs("--goodput", options.goodput, ":")}
        self.metrics = options.percentile_metrics.split(",")
        self.percentiles = [_number("--metric-percentiles", part) for part in options.metric_percentiles.split(",")]
        self.headers = dict(_pairs("--header", options.header, "="))
        self.metadata = dict(_pairs("--metadata", options.metadata, "="))
        for flag, given, known in (
            ("--goodput", list(self.slo), SLO_METRICS),
            ("--percentile-metrics", self.metrics, METRICS),
        ):
            if wrong := [name for name in given if name not in known]:
                raise SettingsError(f"{flag}: got {wrong[0]!r}; allowed: {', '.join(known)}")
        if not all(0 <= percent <= 100 for percent in self.percentiles):
            raise SettingsError("--metric-percentiles: allowed: 0 to 100. A value that works: 50,90,99")
        if options.extra_body.get("n") not in (None, 1):
            raise SettingsError(
                f"--extra-body: got n={options.extra_body['n']!r}; allowed: 1, because "
                "inter-token latency is measured on one answer"
            )
        if options.max_concurrency is not None and options.max_concurrency < 1:
            raise SettingsError(f"--max-concurrency: got {options.max_concurrency}; allowed: at least 1")
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
    options: Namespace,
    check: _Checked,
    requests: Sequence[WorkloadRequest],
    on_answer: Callable[[RequestRecord], None],
) -> tuple[list[RequestRecord], dict[str, Any], Any]:
    """The records, what else is to be said of the run, and what `--predict` simulates."""
    allow_open_files()
    url = options.base_url or f"http://{options.host}:{options.port}"
    pool = ConnectionPool(url, check.headers, verify=not options.insecure, timeout=options.request_timeout)
    await _wait_until_ready(pool, options.ready_check_timeout_sec)
    simulated = None
    if options.predict is not None:
        admin_key = os.environ.get(env_name("admin_keys"), "").partition(",")[0]
        headers = {"authorization": f"Bearer {admin_key}"} if admin_key else None
        simulated = simulated_machine(await pool.get_json("/server_info", headers), options.predict)
    model = options.served_model_name or options.model or await _first_model(pool)
    ignore_eos = options.ignore_eos or options.dataset_name in ("random", "prefix_repetition", "conversation")
    fields = {name: value for name in (*SAMPLING, "logprobs") if (value := getattr(options, name)) is not None}
    fields = {"model": model} | fields | ({"ignore_eos": True} if ignore_eos else {}) | options.extra_body
    path = options.endpoint or ENDPOINTS[options.backend]
    prefix = options.request_id_prefix or f"bench-{uuid.uuid4().hex[:8]}-"
    if options.num_warmups > 0:
        warmups = [replace(requests[0], arrival=0.0)] * options.num_warmups
        await Driver(pool, path, fields, max_concurrency=options.max_concurrency).run(warmups)
    driver = Driver(pool, path, fields, max_concurrency=options.max_concurrency, id_prefix=prefix, on_answer=on_answer)
    records = await driver.run(requests)
    more = (
        {"model_id": model, "began": driver.figures.began}
        | driver.figures.summary()
        | await compare_with_server(pool, records)
    )
    pool.close()
    return records, more, simulated


async def _wait_until_ready(pool: ConnectionPool, seconds: float) -> None:
    """Until it listens and names its models. Raises SettingsError for one that nobody hears in time."""
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
        raise SettingsError("--model: the server names none at /v1/models; say which") from error


def _conditions(options: Namespace, check: _Checked) -> dict[str, Any]:
    """Under which the result was found."""
    names = ["burstiness", "max_concurrency", "num_prompts", "dataset_name", "seed"]
    if options.ramp_up_strategy is not None:
        names += ["ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"]
    return {
        "date": f"{datetime.now():%Y%m%d-%H%M%S}",
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "tokenizer_id": options.tokenizer,
        **check.metadata,
        "request_rate": options.request_rate if options.request_rate < math.inf else "inf",
        **{name: getattr(options, name) for name in names},
    }


def _save(options: Namespace, result: dict[str, Any]) -> Path:
    """JSON on one line, in the file whose name vLLM's client would choose."""
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


def _number(flag: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SettingsError(f"{flag}: got {text!r}; allowed: a number") from None


# -------------------------------------------------------------------------------------------------------------- predict
# `--predict`: what the simulator says of the same workload, and how far from the truth each figure is.


COMPARED = (
    *("duration", "request_throughput", "output_throughput", "max_concurrent_requests", "total_cached_tokens"),
    *(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for kind in ("median", "p90", "p99")),
)


def simulated_machine(server_info: Any, file: str) -> tuple[Machine, Settings]:
    """What is simulated: of the file, else what the server says of itself. Raises SettingsError."""
    if file:
        return read_machine(Path(file), Settings(), flag="--predict")
    if not isinstance(server_info, dict) or not server_info.get("step_cost"):
        raise SettingsError(
            "--predict: the server does not tell what its steps cost. Headrace does at /server_info, to one of its "
            "admin_keys: put it into HEADRACE_ADMIN_KEYS. Or name a file with the answer: --predict FILE"
        )
    try:
        return machine_of(server_info, Settings())
    except ValueError as error:
        raise SettingsError(f"--predict: what the server says of itself is wrong: {error}") from None


def predict(
    requests: Sequence[WorkloadRequest],
    machine: Machine,
    settings: Settings,
    result: Mapping[str, Any],
    max_concurrency: int | None,
) -> dict[str, Any]:
    """`predicted`, by key of the result, and `prediction_error`: predicted over measured, minus 1."""
    told = simulate(requests, machine, settings, max_concurrency=max_concurrency).result(
        percentiles=(90, 99), began=0.0
    )
    predicted = {key: told[key] for key in COMPARED}
    errors = {key: value / result[key] - 1 for key, value in predicted.items() if result.get(key)}
    return {"predicted": predicted, "prediction_error": errors}


# ------------------------------------------------------------------------------------------------------------ timelines
# What a server of this kind says of the same requests: where the time went, and where client and server disagree.


MAX_LOOKUPS = 200  # of a run, evenly spread over the last that the server may remember
REMEMBERED = 1000
_BEFORE_FIRST_TOKEN = ("receive", "tokenize", "queue", "prefill")


async def compare_with_server(pool: ConnectionPool, records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Client's minus server's TTFT and time of the whole request; nothing where the server keeps no timelines.

    The difference of TTFT is the network, the sending and what the client itself adds. The server's medians of each
    segment say what a first token waits for.
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
            break  # another server, or it has forgotten
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
        result |= statistics(name, values, (50, 99))
    return result
