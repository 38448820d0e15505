"""Engines that are described in plain data, in a thread or in a process, seen from the front end only."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from engine.frontend.async_llm import AsyncLLM
from engine.messages import EngineCoreRequest
from engine.transport.client import EngineClient, ThreadClient
from engine.transport.data_parallel import DataParallelClient
from engine.transport.process_client import EngineProcess, ProcessClient
from engine.transport.wire import Report
from tests.engine.helpers import RecordingObserver, until
from tests.engine.serving import MAX_MODEL_LEN, TOKENIZER, VOCAB_SIZE
from tests.engine.simulated_process import COMMAND, Simulation, build

Where = Literal["thread", "process"]


def simulation(**options: Any) -> Simulation:
    return Simulation(**{"vocab_size": VOCAB_SIZE, "max_model_len": MAX_MODEL_LEN, **options})


def process_client(
    on_progress: Report | None = None, *, ends_when_stopped: bool = False, **options: Any
) -> ProcessClient:
    setup = msgspec.to_builtins(simulation(**options))
    child = partial(EngineProcess, COMMAND, ends_when_stopped=ends_when_stopped)
    return ProcessClient(child, setup, on_progress=on_progress)


def client(where: Where, **options: Any) -> EngineClient:
    if where == "process":
        return process_client(**options)
    return ThreadClient(lambda: build(simulation(**options), lambda phase, done, total: None))


@dataclass
class Serving:
    """An engine that runs somewhere."""

    client: Any
    llm: AsyncLLM
    observer: RecordingObserver = field(default_factory=RecordingObserver)

    async def read(self, request: EngineCoreRequest) -> list[int]:
        """All tokens of a request of one choice."""
        async with self.llm.stream(request) as stream:
            return [token_id async for output in stream for token_id in output.token_ids]

    async def assert_nothing_left(self) -> None:
        """Nobody waits here, and the engine says that nobody runs or waits there and that every block is free."""
        assert self.llm.num_open_choices == 0
        await until(lambda: self.client.is_asleep)
        await until(self._is_free)

    def _is_free(self) -> bool:
        stats = self.llm.last_stats
        return stats is None or stats.num_running == stats.num_waiting == stats.kv_cache_usage == 0


@asynccontextmanager
async def serving(where: EngineClient | Where, **options: Any) -> AsyncIterator[Serving]:
    """A loaded engine. `llm.error` tells afterwards how it ended."""
    chosen = client(where, **options) if isinstance(where, str) else where
    observer = RecordingObserver()
    llm = AsyncLLM(chosen, TOKENIZER, observer=observer, seed=0)
    async with llm.running():
        await llm.wait_ready()
        yield Serving(chosen, llm, observer)


def replicas(size: int, *, stall_limit: float = math.inf, **options: Any) -> DataParallelClient:
    slots = options.get("max_num_seqs", 8)
    return DataParallelClient(lambda index: process_client(**options), size, slots, stall_limit=stall_limit)


def process_of(parallel: DataParallelClient, index: int) -> int:
    """The process id of a replica."""
    running = parallel.replicas[index].client
    assert isinstance(running, ProcessClient)
    assert running.pid is not None
    return running.pid


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone, before it was opened or before it was read
        return False


def engines_of_this_process() -> list[int]:
    """Its children that are engines, or were and have not been waited for. Other tests' servers are children, too."""
    children: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            children += (task / "children").read_text().split()
    found = []
    for pid in children:
        with suppress(FileNotFoundError, ProcessLookupError):
            command = Path(f"/proc/{pid}/cmdline").read_text()
            if not command or COMMAND[-1] in command:  # one that has ended has no command
                found.append(int(pid))
    return found
