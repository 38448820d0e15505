"""`headrace simulate`: flags, output, sweeps and the search for the highest rate."""

from __future__ import annotations

import json
import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ByteSize

from app.config.settings import Settings, SettingsError
from app.config.several import settings_of_models
from app.serving.step_cost_file import difference, latest
from app.simulate.driver import Outcome, Recording, simulate
from app.simulate.machine import FIXED, read_machine, table_facts, with_settings
from app.simulate.several import ModelFacts, draw_models, read_models, simulate_models
from app.workload.datasets import WorkloadRequest, add_workload_flags, read_trace, scaled, workload
from app.workload.rendering import doubts_of_steps, page, print_result
from app.workload.report import METRICS, output_file, parse_goodput, per_request
from engine.messages import MAX_N
from engine.simulation.simulation import Outage

SHOWN = {  # columns of a sweep's table: title and key of the result
    "requests/s": "request_throughput",
    "tokens/s": "output_throughput",
    "TTFT p50 ms": "p50_ttft_ms",
    "TTFT p99 ms": "p99_ttft_ms",
    "ITL p50 ms": "p50_itl_ms",
    "ITL p99 ms": "p99_itl_ms",
    "failed": "failed",
    "preempted": "num_preemptions",
    "cached": "total_cached_tokens",
    "refused": "refused",
}
OF_SEVERAL = {  # further columns, with several models
    "loads": "loads",
    "load wait p50 ms": "p50_load_wait_ms",
    "load wait p99 ms": "p99_load_wait_ms",
}
OBEYED = (  # settings that a simulation reads, besides those that its table was measured with
    *("max_num_seqs", "max_num_batched_tokens", "target_inter_token_latency", "enable_prefix_caching", "max_model_len"),
    *("pipeline_depth", "max_queue_time", "max_queued_requests", "max_queued_tokens", "default_timeout"),
    *("default_ttft_timeout", "data_parallel_size", "seed", "memory", "pinned", "idle_unload"),
)
MAX_REPLICAS = 1024
ROUTES = ("prefix", "load", "round-robin", "random")


def add_flags(parser: ArgumentParser) -> None:
    """Add the simulator's own flags. The flags of settings are added elsewhere."""
    add = parser.add_argument_group("machine").add_argument
    add("--table", type=Path, metavar="FILE",
        help="JSON of step costs: the answer of GET /server_info, the result of loadtest.gpu_bench, or a table alone. "
        "Its settings apply where none is given. Default: the latest measurement of this model here.")  # fmt: skip
    add("--num-blocks", type=int, metavar="N", help="KV blocks. Default: the server's in --table.")
    add("--replicas", type=int, metavar="N", help="Engines that share the load. Default: the server's.")
    add("--route", choices=ROUTES, default="prefix", help="How they share it. Default: prefix, as the server does.")
    add("--load-seconds", type=float, default=0.0, metavar="S",
        help="Of several models: seconds to load one. Default: as measured, or 1.")  # fmt: skip
    add_workload_flags(parser)
    parser.set_defaults(num_prompts=None)  # 1,000, or all of a trace
    add = parser.add_argument_group("load").add_argument
    add("--trace", type=Path, metavar="FILE", help="A recorded load instead of a workload: see docs/simulator.md.")
    add("--max-concurrency", type=int, metavar="N", help="Requests at a time. Default: no limit.")
    add("--n", type=int, metavar="N", help="Choices of each request, which share its prompt. Default: 1, or a trace's.")
    add("--model-skew", type=float, default=0.0, metavar="S",
        help="Of several models, the n-th gets requests by 1 / n ** S (1: Zipf). Default: 0, all alike.")  # fmt: skip
    add = parser.add_argument_group("what if").add_argument
    add("--sweep", action="append", default=[], metavar="NAME=V,V",
        help="One run for each value of a setting, num_blocks, max_concurrency or a flag of the workload; several "
        "sweeps give all combinations.")  # fmt: skip
    add("--outage", action="append", default=[], metavar="START:SECONDS:N",
        help="The first N replicas fail at START and are back SECONDS later with empty caches.")  # fmt: skip
    add("--find", choices=("rate",), help="Find the highest request rate that keeps --slo.")
    add("--slo", metavar="LIST", help="In seconds, such as ttft_p99=0.5,itl_p99=0.05.")
    add = parser.add_argument_group("result").add_argument
    add("--goodput", nargs="+", default=[], metavar="KEY:MS", help="Objectives, such as ttft:500 tpot:50.")
    add("--json", type=output_file, metavar="FILE", help="Write the result with lists of figures per request.")
    add("--html", type=output_file, metavar="FILE", help="Write a page with plots.")
    add("--record", type=output_file, metavar="FILE", help="Write frames that the dashboard plays.")


class Case:
    """The parsed flags of one run. Raises SettingsError."""

    def __init__(self, settings: Settings, options: Namespace, changes: Mapping[str, str] | None = None) -> None:
        self.options = Namespace(**vars(options))
        own = {name: text for name, text in (changes or {}).items() if name not in Settings.model_fields}
        for name, text in own.items():
            self._set(name, text)
        if wrong := next((name for name in changes or {} if name not in own and name not in OBEYED), None):
            reason = "--table was measured with one value of it" if wrong in FIXED else "it has no effect here"
            raise SettingsError(f"--sweep: got {wrong}; {reason}. Settings that are simulated: {', '.join(OBEYED)}")
        if self.options.trace is not None:
            _check_beside_trace(self.options)
        elif self.options.num_prompts is None:
            self.options.num_prompts = _workload_defaults()["num_prompts"]
        for name, most in (("num_blocks", 2**31), ("max_concurrency", 2**31), ("replicas", MAX_REPLICAS), ("n", MAX_N)):
            if (value := getattr(self.options, name)) is not None and not 1 <= value <= most:
                raise SettingsError(f"--{name.replace('_', '-')}: got {value}; allowed: 1 to {most}")
        if self.options.route not in ROUTES:  # by a sweep
            raise SettingsError(f"--route: got {self.options.route}; allowed: {', '.join(ROUTES)}")
        swept = {name: text for name, text in (changes or {}).items() if name not in own}
        self.models: list[ModelFacts] = []
        if settings.has_several_models:
            self._read_models(with_settings(settings, swept))
            return
        self.machine, self.settings = read_machine(options.tables[0], settings, self.options.num_blocks)
        size = self.options.replicas or self.settings.data_parallel_size
        self.outages = [_outage(text, size) for text in options.outage]
        self.settings = with_settings(self.settings, swept)

    def _read_models(self, settings: Settings) -> None:
        options = self.options
        for name, usual in (("replicas", None), ("route", "prefix"), ("outage", [])):
            if getattr(options, name) != usual:
                raise SettingsError(f"--{name}: each of several models has one engine. Leave it out, or give one model")
        for name in ("model_skew", "load_seconds"):
            if not 0 <= (value := getattr(options, name)) < math.inf:
                raise SettingsError(f"--{name.replace('_', '-')}: got {value}; allowed: at least 0")
        self.settings = settings
        self.models = read_models(settings, options.tables, options.num_blocks, options.load_seconds)

    def print_tables(self) -> None:
        """Print what the tables of step costs were measured with."""
        for each in self.models or (self,):
            print(f"Step costs of {each.settings.model_names[0]}: {table_facts(each.machine.table)}")

    def _set(self, name: str, text: str) -> None:
        known = [each for each in vars(self.options) if each not in _NOT_SWEPT]
        if name not in known:
            raise SettingsError(f"--sweep: got {name}; allowed: settings, and {', '.join(sorted(known))}")
        before = getattr(self.options, name)
        kind = float if isinstance(before, float) else str if isinstance(before, str) else int
        try:
            setattr(self.options, name, kind(text))
        except ValueError:
            raise SettingsError(f"--sweep: {name}: got {text!r}; allowed: a number") from None

    def requests(self, rate: float | None = None, seed: int | None = None) -> list[WorkloadRequest]:
        """Return the workload or trace. A given rate replaces its own."""
        if self.options.trace is not None:
            requests = read_trace(self.options.trace)[: self.options.num_prompts]
            rate = self.options.request_rate if rate is None else rate
            requests = requests if rate == math.inf else scaled(requests, rate)
        else:
            options = Namespace(**vars(self.options))
            if rate is not None:
                options.request_rate, options.ramp_up_strategy = rate, None
            requests = workload(options, seed=self.settings.seed if seed is None else seed)
        return requests if self.options.n is None else [replace(each, n=self.options.n) for each in requests]

    def run(self, requests: Sequence[WorkloadRequest], watch: Any = None, seed: int | None = None) -> Outcome:
        """Simulate these requests and return the outcome. A given seed replaces the setting."""
        if self.models:
            owners = draw_models(requests, len(self.models), self.options.model_skew, self.settings.seed)
            more = {"max_concurrency": self.options.max_concurrency, "watch": watch, "seed": seed}
            return simulate_models(requests, owners, self.models, self.settings, **more)
        flags = {name: getattr(self.options, name) for name in ("max_concurrency", "replicas", "route")}
        return simulate(requests, self.machine, self.settings, outages=self.outages, watch=watch, seed=seed, **flags)


def _workload_defaults() -> dict[str, Any]:
    parser = ArgumentParser()
    add_workload_flags(parser)
    return vars(parser.parse_args([]))


def _check_beside_trace(options: Namespace) -> None:
    """Raise SettingsError for a flag of the workload that is given with a trace: the trace is the workload."""
    for name, default in _workload_defaults().items():
        value = getattr(options, name, default)
        if name not in ("num_prompts", "request_rate") and value != default:
            flag = name.replace("_", "-")
            raise SettingsError(
                f"--{flag}: got {value}; --trace already has the requests and their times. Leave out one of them"
            )
    if not options.request_rate > 0:
        raise SettingsError(f"--request-rate: got {options.request_rate}; allowed: more than 0")
    if options.num_prompts is not None and options.num_prompts < 1:
        raise SettingsError(f"--num-prompts: got {options.num_prompts}; allowed: at least 1")


_NOT_SWEPT = (
    *("table", "tables", "trace", "sweep", "outage", "find", "slo", "goodput", "json", "html", "record"),
    *("dataset_path", "dataset_name"),
)


def run(settings: Settings, **given: Any) -> int:
    """Return exit code 0, or 1 if no request succeeded. Raises SettingsError."""
    options = Namespace(**given)
    models = settings_of_models(settings) if settings.has_several_models else [settings]
    options.tables = [options.table or _latest_table(each) for each in models]
    if (options.find is None) != (options.slo is None):
        raise SettingsError("--find and --slo go together. What works: --find rate --slo ttft_p99=0.5,itl_p99=0.05")
    several = "--find" if options.find is not None else "--sweep" if options.sweep else None
    unused = ("html", "record", "goodput", *(() if several == "--sweep" else ("json", "sweep")))
    if several and (wrong := next((name for name in unused if getattr(options, name)), None)):
        raise SettingsError(f"--{wrong}: {several} makes many runs; allowed: one run. Leave out one of them")
    if options.find is not None:
        return _find(Case(settings, options))
    if options.sweep:
        return _sweep(settings, options)
    slo = parse_goodput(options.goodput)
    case = Case(settings, options)
    case.print_tables()
    requests = case.requests()
    with ExitStack() as scope:
        watch = None
        if options.record is not None:
            watch = Recording(scope.enter_context(options.record.open("wb"))).watch
        outcome = case.run(requests, watch)
    result = _conditions(case, requests) | outcome.result(slo=slo)
    print_result(result)
    print(
        f"{result['simulated_seconds']:,.1f} simulated seconds, {result['simulation_speed']:,.0f} a second; "
        f"{result['num_steps']:,} steps, {result['num_preemptions']:,} preemptions, "
        f"{100 * result['slot_utilization']:.0f} % of the slots and {100 * result['device_utilization']:.0f} % of the "
        "time in use"
    )
    if case.models:
        _print_models(result)
    if (imbalance := result.get("uncached_tokens_max_by_mean")) is not None:
        hits = result["total_cached_tokens"] / max(result["total_input_tokens"], 1)
        print(
            f"Routed by {case.options.route}: {100 * hits:.0f} % of the prompts from prefix caches; uncached tokens in "
            f"flight: the most of one engine is {imbalance:.2f} times the mean; {result['refused']:,} refused, "
            f"{result['num_placed_again']:,} placed again"
        )
    if options.html is not None:
        options.html.write_text(page(result, outcome.records), encoding="utf-8")
    if options.json is not None:
        options.json.write_text(json.dumps(result | per_request(outcome.records)), encoding="utf-8")
    return 0 if result["completed"] else 1


def _latest_table(settings: Settings) -> Path:
    path = latest(settings) or latest(settings.model_copy(update={"served_model_name": ()}))
    if path is None:
        raise SettingsError(
            f"--table: there are no measured step costs of {settings.model_names[0]} on this machine. Start `headrace "
            "serve` once, or give a file with a server's answer to GET /server_info"
        )
    print(f"Step costs of {settings.model_names[0]}: {path}")
    if (text := difference(path)) is not None:
        print(f"Warning: {text}. Measure again with `headrace doctor` while the machine is idle.", file=sys.stderr)
    return path


def _print_models(result: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    waits = [f"load wait {name} ms" for name in ("p50", "p99")]
    table = Table("model", "requests", "loads", "waited", *waits, "refused", box=None, padding=(0, 2))
    for name, each in result["models"].items():
        counts = [each[key] for key in ("requests", "loads", "waited_for_load")]
        times = (f"{each[f'{name}_load_wait_ms']:,.0f}" for name in ("p50", "p99"))
        table.add_row(name, *map(str, counts), *times, str(each["refused"]))
    Console(width=max(Console().width, 100)).print(table)
    most, limit = (ByteSize(result[name]).human_readable() for name in ("most_memory_used", "memory_limit"))
    print(f"Memory: at most {most} of {limit}")


def _conditions(case: Case, requests: Sequence[WorkloadRequest]) -> dict[str, Any]:
    rate = case.options.request_rate
    return {
        "label": "simulated",
        "model_id": f"{len(case.models)} models" if case.models else case.settings.model_names[0],
        "backend": "simulate",
        "request_rate": rate if rate < math.inf else "inf",
        "burstiness": case.options.burstiness,
        "max_concurrency": case.options.max_concurrency,
        "num_prompts": len(requests),
        "n": min(numbers) if len(numbers := {each.n for each in requests}) == 1 else None,  # a trace may have several
        "client_was_late": False,
    }


def _outage(text: str, replicas: int) -> Outage:
    try:
        start, seconds, number = (float(part) for part in text.split(":"))
    except ValueError:
        start = seconds = number = math.nan
    if not (0 <= start < math.inf and 0 < seconds < math.inf and number in range(1, replicas)):
        raise SettingsError(
            f"--outage: got {text!r}; allowed: START:SECONDS:N, N at least 1 and less than the {replicas} replicas, "
            "such as 20:30:1"
        )
    return Outage(start, start + seconds, range(int(number)))


def _find(case: Case) -> int:
    limits = parse_slo(case.options.slo)
    case.print_tables()
    results: dict[float, Mapping[str, Any]] = {}

    def result(rate: float, seed: int) -> Mapping[str, Any]:
        results[rate] = case.run(case.requests(rate, seed), seed=seed).result()
        return results[rate]

    found = find_rate(result, limits, case.settings.seed)
    print(found, *doubts_of_steps(results[found.holds]), sep="\n")
    return 0


def _sweep(settings: Settings, options: Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    sweeps = parse_sweeps(options.sweep)
    cases = [Case(settings, options, changes) for changes in sweeps]  # checks all before the first run
    cases[0].print_tables()
    results: list[dict[str, Any]] = []
    shown = SHOWN | (OF_SEVERAL if settings.has_several_models else {})
    table = Table(*sweeps[0], *shown, box=None, padding=(0, 2), header_style="bold")
    for changes, case in zip(sweeps, cases, strict=True):
        requests = case.requests()
        result = _conditions(case, requests) | case.run(requests).result()
        results.append({"changes": changes, **result})
        figures = [result[key] for key in shown.values()]
        table.add_row(
            *changes.values(), *(f"{each:,.2f}" if isinstance(each, float) else f"{each:,}" for each in figures)
        )
    Console(width=max(Console().width, 20 * len(sweeps[0]) + 14 * len(shown))).print(table)
    for doubt in dict.fromkeys(doubt for result in results for doubt in doubts_of_steps(result)):
        print(doubt)
    if options.json is not None:
        options.json.write_text(json.dumps({"sweep": results}), encoding="utf-8")
    return 0


# --------------------------------------------------------------------------------------------------------------- search
# Sweeps, and the highest rate that keeps the objectives.


MAX_RUNS = 64  # of a sweep
BRACKET = 1.02  # the ratio of the rates at which the search ends
MAX_DOUBLINGS = 12
CHECK_SEEDS, NEEDED_SEEDS = 5, 4  # a rate holds if it holds with so many of these seeds

Simulate = Callable[[float, int], Mapping[str, Any]]  # from a rate and a seed to the result


def parse_sweeps(given: Sequence[str]) -> list[dict[str, str]]:
    """Parse values of --sweep (`max_num_seqs=8,16`) and return every combination of settings. Raises SettingsError."""
    axes: dict[str, list[str]] = {}
    for text in given:
        name, found, values = text.partition("=")
        axes[name.strip().replace("-", "_")] = parts = [part.strip() for part in values.split(",") if part.strip()]
        if not found or not parts:
            raise SettingsError(f"--sweep: got {text!r}; allowed: NAME=VALUE,VALUE. What works: max_num_seqs=8,16,32")
    combinations = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    if len(combinations) > MAX_RUNS:
        raise SettingsError(f"--sweep: {len(combinations)} combinations; allowed: at most {MAX_RUNS}")
    return combinations


def parse_slo(text: str) -> dict[str, float]:
    """Parse `ttft_p99=0.5,itl_p99=0.05` to seconds by the keys of a result. Raises SettingsError."""
    limits = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        metric, _, statistic = name.strip().partition("_")
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        if metric not in METRICS or statistic not in ("mean", "p50", "p90", "p99") or not seconds > 0:
            raise SettingsError(
                f"--slo: got {part!r}; allowed: {', '.join(METRICS)}, each with _mean, _p50, _p90 or _p99, and seconds "
                "above 0. What works: ttft_p99=0.5,itl_p99=0.05"
            )
        limits[f"{statistic}_{metric}_ms"] = seconds
    return limits


class FoundRate(NamedTuple):
    """The highest rate found that holds and the lowest that does not, in requests per second, and the number of seeds
    with which each keeps the objectives."""

    holds: float
    fails: float
    num_seeds: int
    hold_at_holds: int
    hold_at_fails: int
    runs: int

    def __str__(self) -> str:
        return (
            f"{self.holds:.3g} requests/s keep the objectives with {self.hold_at_holds} of {self.num_seeds} seeds, "
            f"{self.fails:.3g} only with {self.hold_at_fails} (at least {NEEDED_SEEDS} are needed); {self.runs} runs"
        )


def find_rate(simulate: Simulate, limits: Mapping[str, float], seed: int = 0) -> FoundRate:
    """Find the highest rate that holds, by bisection with the same random numbers at each rate. A run holds if all
    requests succeed and no figure exceeds its limit; a rate holds if the runs of `NEEDED_SEEDS` seeds hold. Raises
    SettingsError if no rate holds, or every rate does."""
    kept: dict[tuple[float, int], bool] = {}
    seeds = range(seed, seed + CHECK_SEEDS)

    def keeps(rate: float, seed: int) -> bool:
        if (rate, seed) not in kept:
            result = simulate(rate, seed)
            kept[rate, seed] = not result["failed"] and all(result[key] <= 1e3 * s for key, s in limits.items())
        return kept[rate, seed]

    def holds(rate: float) -> bool:
        failed = 0
        for each in seeds:
            failed += not keeps(rate, each)
            if failed > CHECK_SEEDS - NEEDED_SEEDS:
                return False
        return True

    low = high = 1.0
    if holds(low):
        while holds(high := high * 2):
            low = high
            if high >= 2**MAX_DOUBLINGS:
                raise SettingsError(
                    f"--find: {high:g} requests/s still keep --slo; give a longer workload with --num-prompts"
                )
    else:
        while not holds(low := low / 2):
            high = low
            if low <= 2**-MAX_DOUBLINGS:
                raise SettingsError(
                    f"--slo: not even {low:.2g} requests/s hold; give limits that one request alone keeps"
                )
    while high / low > BRACKET:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    hold_at_holds, hold_at_fails = (sum(keeps(rate, each) for each in seeds) for rate in (low, high))
    return FoundRate(low, high, CHECK_SEEDS, hold_at_holds, hold_at_fails, len(kept))
