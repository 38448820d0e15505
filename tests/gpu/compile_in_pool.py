"""Compile kernels in a pool and print what happened: `python -m tests.gpu.compile_in_pool FOLDER`.

Everything is compiled for real, for a card that is not there. Prints one JSON object of findings. Runs in a process of
its own, because Triton decides once whether it interprets.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import JITFunction

from engine.errors import HeadraceError
from gpu import kernels
from gpu.device.warm_up import compile_kernels
from gpu.kernels.decode import _decode
from gpu.runner.runner import StageLinks, WorkerOptions
from gpu.worker import Worker
from tests.gpu.fake_card import pretend
from tests.gpu.test_executor import CONFIG, random_weights


@triton.jit
def _wrong(target_ptr):
    tl.store(target_ptr + tl.arange(0, 3), 0)  # not a power of two


class Stop(Exception):
    """An abort."""


def launch() -> None:
    """Five forms of three kernels."""
    kernels.silu_and_mul(torch.zeros(4, 64))
    kernels.gelu_and_mul(torch.zeros(4, 64))
    kernels.gather_rows(torch.zeros(4, 64), torch.zeros(3, dtype=torch.int64))
    kernels.gather_rows(torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int64))
    kernels.add_rms_norm(torch.zeros(4, 64), torch.zeros(4, 64), torch.zeros(64), 1e-5)


class Compiler:
    """Compiles as a new process would. Counts the kernels that were not in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kernels: dict[str, JITFunction] = {}
        self.asked: list[str] = []
        triton.knobs.runtime.jit_cache_hook = self._note

    def _note(self, *, fn: Any, **_: Any) -> None:
        self._kernels[fn.name] = fn.jit_function
        self.asked.append(fn.name)

    def compile(self, name: str, compile_all: Callable[[], object]) -> list[str]:
        """Return the keys under which the kernels are on the disk."""
        os.environ["TRITON_CACHE_DIR"] = str(self._folder / name)
        for kernel in self._kernels.values():
            kernel.device_caches.clear()
        compile_all()
        return self.keys(name)

    def keys(self, name: str) -> list[str]:
        """Of the kernels on the disk."""
        return sorted(file.parent.name for file in (self._folder / name).glob("*/*.cubin"))

    def in_memory(self) -> list[str]:
        """Of the kernels in memory; an unfinished one has none."""
        caches = [cache for each in self._kernels.values() for cache, *_ in each.device_caches.values()]
        compiled = [kernel for cache in caches for kernel in cache.values()]
        return sorted(kernel.hash if type(kernel) is CompiledKernel else "" for kernel in compiled)


def refusal(compile_all: Callable[[], object]) -> str:
    try:
        compile_all()
    except (HeadraceError, Stop) as error:
        assert active_mode.get() is None
        return f"{type(error).__name__}: {error}"
    return ""


def broken_parses() -> list[str]:
    """Parse a kernel in many threads, which take turns at each of many garbage collections."""

    def parse(number: int) -> str:
        try:
            _decode.parse()
        except SystemError as error:
            return str(error)
        return ""

    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    gc.callbacks.append(lambda phase, info: sum(range(20)))
    sys.setswitchinterval(1e-6)
    gc.set_threshold(50)
    with ThreadPoolExecutor(4) as threads:
        broken = [words for words in threads.map(parse, range(100)) if words]
    gc.callbacks.pop()
    sys.setswitchinterval(interval)
    gc.set_threshold(*threshold)
    return broken


def main() -> None:
    pretend()
    folder = Path(sys.argv[1])
    compiler, found = Compiler(folder), dict[str, Any]()
    found["broken parses"] = broken_parses()
    found["serial"] = compiler.compile("serial", launch)
    found["pool"] = compiler.compile("pool", lambda: compile_kernels(launch, 2))
    found["in memory"] = len(compiler.in_memory())
    found["unfinished"] = compiler.in_memory().count("")
    found["again"] = compiler.compile("pool", lambda: compile_kernels(launch, 2)) == found["pool"]
    compiler.asked.clear()
    launch()
    found["asked by launches"] = [*compiler.asked]

    def stop(phase: str, done: int, total: int | None) -> None:
        if done == 1:
            raise Stop

    found["stopped"] = refusal(lambda: compiler.compile("stopped", lambda: compile_kernels(launch, 1, stop)))
    found["before the stop"] = len(compiler.keys("stopped"))
    compile_kernels(launch, 2)
    found["after the stop"] = compiler.keys("stopped")
    found["wrong"] = refusal(lambda: compile_kernels(lambda: _wrong[(1,)](torch.zeros(3)), 2))

    reports: list[tuple[str, int, int | None]] = []

    def report(phase: str, done: int, total: int | None) -> None:
        reports.append((phase, done, total))
        if done == total:
            compiler.asked.clear()

    options = WorkerOptions(dtype="bfloat16", max_model_len=64, max_num_seqs=8, num_threads=2)
    compiler.compile("worker", lambda: Worker(CONFIG, random_weights(), options, progress=report))
    found |= {"reports": reports, "asked by the worker": [*compiler.asked]}
    found["of the worker"] = len(compiler.keys("worker"))
    reports_of_stage: list[tuple[str, int, int | None]] = []
    links = StageLinks(receive=lambda num_tokens: np.zeros((num_tokens, CONFIG.hidden_size), np.float32))
    stage = partial(Worker, links=links, progress=lambda *report: reports_of_stage.append(report))
    options = replace(options, kv_cache_memory=2**20)
    compiler.compile("worker", lambda: stage(CONFIG, random_weights(), options))
    found["reports of a stage"] = reports_of_stage
    print(json.dumps(found))


if __name__ == "__main__":
    main()
