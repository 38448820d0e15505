"""`headrace doctor`: checks this machine and the settings, and says what to change.

It loads the model as a server would and makes steps. A finding is `ok`, a `note` with advice, or `wrong`: then a server
would not start, and the exit code is 1.
"""

from __future__ import annotations

import logging
import os
import platform
import re
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import NamedTuple

from app.admission.tenants import Tenants
from app.config.settings import Settings, SettingsError
from app.config.sources import flag_name
from app.http.connections import ENOUGH_FILES, connection_limits
from app.http.listening import Certificate
from app.library import loading
from app.observability.tracing import open_tracer
from app.serving.loading import core_factory, open_files
from app.serving.process import bind
from app.serving.prompts import open_prompts
from app.serving.step_cost_file import difference, latest
from engine.core.core import EngineCore
from engine.costs.table import StepCostTable, StepLoad, chunk_keys
from engine.errors import HeadraceError
from gpu.cpu.builds import BUILDS
from gpu.cpu.library import built, usable
from gpu.cuda_host import why_no_device
from gpu.host import available_memory, cuda_devices, has_torch, processor_flags, processor_name, usable_cores
from gpu.kv_cache import size_text

OK, NOTE, WRONG = "ok", "note", "wrong"
LONG_PROMPT = 1024  # tokens of the prompt of the shown time to first token


class Finding(NamedTuple):
    verdict: str
    subject: str
    text: str
    advice: str = ""


def add_flags(parser: ArgumentParser) -> None:
    """Add no flags: the command has only settings."""


def run(settings: Settings) -> int:
    """Print each finding at once, and return the exit code."""
    logging.getLogger().setLevel(logging.ERROR)  # the findings replace the log of a start
    is_wrong = False
    for finding in findings(settings):
        is_wrong |= finding.verdict == WRONG
        print(f"{finding.verdict:5}  {finding.subject:12}  {finding.text}", flush=True)
        if finding.advice:
            print(f"{'':21}-> {finding.advice}", flush=True)
    return int(is_wrong)


def findings(settings: Settings) -> Iterator[Finding]:
    """Yield all findings. Loads the model and computes for some seconds."""
    yield from _processor(settings)
    yield from _instructions()
    yield from _devices(settings)
    yield from _packages(requires("headrace") or ())
    yield from _network(settings)
    yield from _other_settings(settings)
    core = None
    try:
        with loading() as progress:
            files = open_files(settings, progress)
            open_prompts(settings, files).close()
            core = core_factory(settings, files, measures_anew=True)()
        yield Finding(OK, "model", getattr(core.executor, "summary", ""))
        yield from _speed(core, settings)
    except HeadraceError as error:
        yield Finding(WRONG, "model", str(error))
    finally:
        if core is not None:
            core.shutdown()


def _processor(settings: Settings) -> Iterator[Finding]:
    cores, present = usable_cores(), os.cpu_count() or 1
    name = processor_name() or platform.machine()
    yield Finding(
        OK, "machine", f"{name}: {cores} cores for {present} processors, {size_text(available_memory())} free. "
        f"Linux {platform.release()}, Python {platform.python_version()}",
    )  # fmt: skip
    if _is_busy():
        text = f"{os.getloadavg()[0]:.1f} processes on average were running or waiting, for {cores} cores"
        yield Finding(NOTE, "other work", text, "run it again on an idle machine: other work lowers the speeds below")
    if settings.num_threads is not None and settings.num_threads > cores:
        yield Finding(
            NOTE, "threads", f"{settings.num_threads} threads share {cores} cores and wait for each other",
            f"{flag_name('num_threads')} {cores}, or leave it out",
        )  # fmt: skip


def _is_busy() -> bool:
    return os.getloadavg()[0] > usable_cores() / 2


def _instructions() -> Iterator[Finding]:
    """Yield the build of the CPU library that runs here, and why faster builds do not."""
    flags, made, allowed = processor_flags(), built(), [library.name for library in usable()]
    for name, build in BUILDS.items():
        if build.machine != platform.machine():
            continue
        if name in allowed:
            yield Finding(OK, "instructions", build.instructions)
            return
        if not build.flags <= flags:
            continue
        if name in made:
            yield Finding(NOTE, "instructions", f"the kernel does not permit {build.instructions} here")
        else:
            yield Finding(
                NOTE, "instructions", f"the library was not built for {build.instructions}",
                "install a C++ compiler (on Debian: g++) and install Headrace again",
            )  # fmt: skip
    yield Finding(NOTE, "instructions", "no build of the CPU library runs here: torch computes, several times slower")


def _devices(settings: Settings) -> Iterator[Finding]:
    devices = [] if settings.device == "cpu" else cuda_devices()
    if not devices:
        yield Finding(OK, "device", "cpu" if settings.device == "cpu" else "cpu: there is no CUDA device")
        return
    if not has_torch():
        yield Finding(
            WRONG if settings.device == "cuda" else NOTE, "device",
            f"there are {len(devices)} CUDA devices, and torch is not installed", "pip install '.[torch]' in a clone",
        )  # fmt: skip
        return
    import torch

    if not torch.cuda.is_available():
        reason, advice = why_no_device(torch.__version__, torch.version.cuda)
        text = f"there are {len(devices)} CUDA devices, and torch cannot use them: {reason}"
        yield Finding(WRONG if settings.device == "cuda" else NOTE, "device", text, advice)
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        kind = f"{found.name}, compute capability {found.major}.{found.minor}"
        yield Finding(OK, "device", f"{kind}, {size_text(found.total_memory)}; torch {torch.__version__}")


def _packages(requirements: Iterable[str]) -> Iterator[Finding]:
    """Yield findings about packages of other versions than the tested ones."""
    for requirement in requirements:
        found = re.match(r"([\w.-]+)(?:\[.*\])?==([\w.]+)$", requirement)
        if found is None:  # of an extra
            continue
        name, wanted = found.groups()
        try:
            is_there = version(name).partition("+")[0]
        except PackageNotFoundError:
            is_there = "none"
        if is_there != wanted:
            yield Finding(NOTE, "packages", f"{name} is {is_there}; the tested version is {wanted}")


def _network(settings: Settings) -> Iterator[Finding]:
    try:
        bind(settings).close()
        limits = connection_limits(settings)
    except HeadraceError as error:
        yield Finding(WRONG, "network", str(error))
        return
    text = f"{settings.uds or f'port {settings.port}'} is free; {limits.connections} connections at once"
    if limits.connections < settings.max_queued_requests:
        few = f"{text}, fewer than {settings.max_queued_requests} requests that may wait"
        yield Finding(NOTE, "network", few, f"ulimit -n {ENOUGH_FILES}")
    else:
        yield Finding(OK, "network", text)


def _other_settings(settings: Settings) -> Iterator[Finding]:
    """Check the files of tenants, the certificate and the tracing settings."""
    try:
        Tenants(settings)
        Certificate.of(settings)
        open_tracer(settings, lambda reason, count: None).close()
    except SettingsError as error:
        yield Finding(WRONG, "settings", str(error))


def _speed(core: EngineCore, settings: Settings) -> Iterator[Finding]:
    """Measure steps; yield the speed, and settings that are too large for it."""
    while core.prepare():
        pass
    costs = core.costs
    one, most = costs.decode.at(1), settings.max_num_seqs
    if not one:
        yield Finding(NOTE, "speed", "steps could not be measured")
        return
    if (path := latest(settings)) is not None and (warning := difference(path)) is not None:
        yield Finding(NOTE, "speed", warning, "run it again while nothing else runs on the machine")
    first = _prefill_seconds(costs, settings)
    after = f"after {first:.2g} s" if first else "was not measured in time"
    text = (
        f"{1 / one:.0f} tokens/s for one stream, {most / costs.decode.at(most):.0f} for {most}; "
        f"the first token of a prompt of {LONG_PROMPT:,} {after}"
    )
    gap, target = costs.decode.at(most), settings.target_inter_token_latency
    if gap <= target or _is_busy():
        yield Finding(OK, "speed", text)
        return
    fits = max((size for size in range(1, most) if costs.decode.at(size) <= target), default=1)
    yield Finding(
        NOTE, "speed", f"{text}. With {most} streams a token comes every {gap:.2g} s; the target is {target:.2g} s",
        f"{flag_name('max_num_seqs')} {fits}, or {flag_name('target_inter_token_latency')} {gap:.2g}",
    )  # fmt: skip


def _prefill_seconds(costs: StepCostTable, settings: Settings) -> float:
    """Return the time to first token of a long prompt without other requests."""
    total, start, chunk = 0.0, 0, settings.max_num_batched_tokens
    while start < LONG_PROMPT:
        size = min(chunk, LONG_PROMPT - start)
        total += costs.cost(StepLoad(0, 0, 1, size, chunk_keys(start, size)))
        start += size
    return total
