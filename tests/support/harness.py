"""A real Headrace in a real Hypercorn process, for the tests of this folder.

`Server` starts `hypercorn app:main` on a free port, exactly as an operator would, and tells its tests what it serves,
logs and counts. It promises that nothing outlives the block it is used in: SIGTERM first, then the whole process group,
and a server that does not end by itself fails the test. So does one whose event loop was held by a request.

Tests never assert a time. They wait for a state (`wait_until`) under a deadline that is generous enough for a busy
machine and fails with the state that was found instead.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.embedded_model import embedded_gguf
from tests.support.raw_client import RawClient

T = TypeVar("T")

REPOSITORY = Path(__file__).parents[2]
MODEL = "smollm2-135m-instruct"
PR_SET_PDEATHSIG = 1  # of Linux's prctl
MAX_HOLD = 0.1  # seconds of processor time; half of it on a machine that has nothing else to do
TIMEOUT = 120.0  # seconds until a state that should come soon counts as never coming


class Server:
    """One server process; a context manager. Keyword arguments are Headrace's settings: `max_num_seqs=4`.

    Entering starts the process; `wait_ready` waits for the model. `client` is an HTTP client bound to it.
    """

    def __init__(self, worker_class: str = "uvloop", **settings: object) -> None:
        self.worker_class = worker_class
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        json = {"content-type": "application/json"}  # for bodies that are sent as bytes, too
        self.client = httpx.Client(base_url=self.base_url, headers=json, timeout=TIMEOUT, trust_env=False)
        self._settings = {
            "model": MODEL,
            "dtype": "auto",  # what users run, and loaded four times as fast as any other: the file's own bits
            "num_threads": 1,
            "kv_cache_memory": "256MiB",
            "max_model_len": 4096,
            "log_format": "json",
        } | settings
        self.environment: dict[str, str] = {}  # more than settings, for servers that are not `app:main`
        self.descriptors: tuple[int, ...] = ()  # that the process inherits
        self.max_open_files: int | None = None  # of the process; None: as many as the tests may open
        # Its position is shared with the process: only because writes append may the log be read while it is written.
        self._log = tempfile.TemporaryFile("a+")  # noqa: SIM115 - as long as this object
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if self._settings["model"] == MODEL:
            embedded_gguf()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        environment |= {f"HEADRACE_{name.upper()}": str(value) for name, value in self._settings.items()}
        environment |= self.environment
        self._process = subprocess.Popen(
            [sys.executable, "-m", *self.command()],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            pass_fds=self.descriptors,
            preexec_fn=partial(_prepare_process, self.max_open_files),  # noqa: PLW1509 - takes no lock
        )
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._process is not None
        self.client.close()
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                self._process.wait(TIMEOUT)
        finally:
            leaked = _kill_group(self._process.pid)
            self._process.wait()
        if exc_info[0] is None:
            assert not leaked, f"the server left processes behind\n{self.log}"
            held = [line for line in self.log.splitlines() if longest_hold(line) > MAX_HOLD]
            assert not held, "requests have held the event loop\n" + "\n".join(held)

    # --- the process

    def command(self) -> list[str]:
        """The module that is run, and its arguments."""
        return ["hypercorn", "--bind", f"127.0.0.1:{self.port}", "--worker-class", self.worker_class, "app:main"]

    @property
    def pid(self) -> int:
        """The id of the process."""
        assert self._process is not None
        return self._process.pid

    def wait_ready(self) -> Self:
        """Wait until tokens can be made."""
        # Seldom, because the server needs the time more.
        self.poll(lambda: self.get_or_none("/readyz"), lambda answer: answer is not None and answer.is_success, 0.05)
        return self

    def stop(self) -> int:
        """SIGTERM and the exit status."""
        self.send_signal(signal.SIGTERM)
        return self.wait_exit()

    def send_signal(self, number: signal.Signals) -> None:
        """To the process that was started."""
        assert self._process is not None
        self._process.send_signal(number)

    def setting(self, name: str) -> object:
        """What it was started with."""
        return self._settings[name]

    def kill(self) -> None:
        """SIGKILL to all of its processes, and wait until they are gone."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(TIMEOUT)

    def wait_exit(self) -> int:
        """The exit status of a server that ends by itself."""
        assert self._process is not None
        return self._process.wait(TIMEOUT)

    @property
    def log(self) -> str:
        """What the process has written so far."""
        self._log.seek(0)
        return self._log.read()

    # --- asking it

    def get_or_none(self, path: str) -> httpx.Response | None:
        """The answer, or None while nobody listens."""
        try:
            return self.client.get(path)
        except httpx.TransportError:
            return None

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return self.client.post(path, json=body, headers=headers)

    def complete(
        self, prompt: Sequence[str] | Sequence[int] | Sequence[Sequence[int]], **fields: Any
    ) -> dict[str, Any]:
        """The body of a greedy, not streamed completion."""
        answer = self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, content: str, **fields: object) -> dict[str, Any]:
        """The body of a greedy, not streamed chat completion."""
        messages = [{"role": "user", "content": content}]
        answer = self.post("/v1/chat/completions", {"messages": messages, "temperature": 0, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def connect(self, *, receive_buffer: int | None = None) -> RawClient:
        """A connection of its own, byte for byte under the test's control."""
        return RawClient("127.0.0.1", self.port, timeout=TIMEOUT, receive_buffer=receive_buffer)

    # --- its metrics

    def metrics(self) -> Metrics:
        answer = self.client.get("/metrics")
        assert answer.status_code == 200, answer.text
        return Metrics.parse(answer.text)

    def wait_until(self, condition: Callable[[Metrics], bool]) -> Metrics:
        """Wait for the metrics to say so, and return them."""
        return self.poll(self.metrics, condition)

    def wait_idle(self) -> Metrics:
        """Wait until nobody runs, nobody waits and nobody owns a KV block."""
        return self.wait_until(lambda now: now.running == now.waiting == now.kv_usage == 0)

    def poll(self, look: Callable[[], T], condition: Callable[[T], bool], interval: float = 0.005) -> T:
        """Look again and again until the condition holds. Fails with what was seen last and the server's log."""
        assert self._process is not None
        deadline = time.monotonic() + TIMEOUT
        pause = interval
        while True:
            seen = look()
            if condition(seen):
                return seen
            if self._process.poll() is not None:
                raise AssertionError(f"the server has ended with status {self._process.returncode}\n{self.log}")
            if time.monotonic() > deadline:
                raise AssertionError(f"still {seen} after {TIMEOUT} s\n{self.log}")
            time.sleep(pause)
            pause = max(interval, min(2 * pause, 0.03))  # what takes long needs the processor itself


@dataclass(frozen=True)
class Metrics:
    """One reading of /metrics."""

    running: int
    waiting: int
    kv_usage: float
    prompt_tokens: int
    computed_tokens: int  # of prompts: prefill work that was done
    generation_tokens: int
    finished: dict[str, int]  # by reason
    samples: dict[str, float] = field(repr=False)  # everything, by name{label=value,...}, model and engine left out

    @classmethod
    def parse(cls, text: str) -> Self:
        samples: dict[str, float] = {}
        finished: dict[str, int] = {}
        for line in text.splitlines():
            if line.startswith("#"):
                continue
            series, _, value = line.rpartition(" ")
            name, reason = _read_series(series)
            samples[name] = float(value)
            if reason is not None:
                finished[reason] = int(float(value))
        return cls(
            running=int(samples["vllm:num_requests_running"]),
            waiting=int(samples["vllm:num_requests_waiting"]),
            kv_usage=samples["vllm:kv_cache_usage_perc"],
            prompt_tokens=int(samples["vllm:prompt_tokens_total"]),
            computed_tokens=int(samples["vllm:prompt_tokens_by_source_total{source=local_compute}"]),
            generation_tokens=int(samples["vllm:generation_tokens_total"]),
            finished=finished,
            samples=samples,
        )

    @property
    def aborted(self) -> int:
        return self.finished["abort"]

    def http_requests(self, handler: str, status: str, method: str = "POST") -> int:
        """Requests answered on a route, by status class ("2xx")."""
        return int(self.samples.get(f"http_requests_total{{handler={handler},method={method},status={status}}}", 0))


@lru_cache(8192)  # the same hundreds at each look, and looks are thousands
def _read_series(series: str) -> tuple[str, str | None]:
    """The name in `Metrics.samples`, and the reason if it counts requests that have ended for one."""
    ((sample,),) = (family.samples for family in text_string_to_metric_families(f"{series} 0"))
    labels = {name: sample.labels[name] for name in sorted(sample.labels.keys() - {"model_name", "engine"})}
    inner = ",".join(f"{name}={value}" for name, value in labels.items())
    reason = labels["finished_reason"] if sample.name == "vllm:request_success_total" else None
    return f"{sample.name}{{{inner}}}" if inner else sample.name, reason


def longest_hold(log: str) -> float:
    """The longest time in seconds for which the log says that something has held the event loop; 0 if it does not."""
    return max((float(seconds) for seconds in re.findall(r"held the event loop for ([0-9.]+) s", log)), default=0.0)


def _prepare_process(max_open_files: int | None) -> None:
    """Runs in the new process. It gets SIGTERM if the tests are killed and cannot send one themselves."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if max_open_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_open_files, max_open_files))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _kill_group(group: int) -> bool:
    """End what is left of a process group. Returns whether there was anything."""
    # Hypercorn's worker and multiprocessing's resource tracker follow their parent within moments.
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not _lives(group):
            return False
        time.sleep(0.01)
    os.killpg(group, signal.SIGKILL)
    return True


def _lives(group: int) -> bool:
    """Whether a process of the group runs; one that has ended may stay listed until its new parent notices."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group, *_ = stat.read_text().rpartition(")")[2].split()
            if int(its_group) == group and state not in "ZX":
                return True
    return False
