"""Servers under measurement as processes: started, waited for, accounted for and ended. Used by all measures here."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.02  # between two questions whether a server is ready
MEASURE_SECONDS = 600.0  # the longest that one load may take


@dataclass
class Target:
    """A server to be measured."""

    name: str
    url: str
    model: str
    pid: int | None  # of its first process; None if it is not known

    def processes(self) -> list[int]:
        """Its first process and all that descend from it."""
        return [] if self.pid is None else [self.pid, *_descendants(self.pid)]

    def cpu_seconds(self) -> float:
        """User and system time of all its processes so far."""
        return sum(map(_cpu_seconds, self.processes()))

    def rss_mib(self) -> float:
        """Resident memory of all its processes. What they share counts for each."""
        return sum(map(_rss_bytes, self.processes())) / 2**20

    def measure(
        self, num_streams: int, num_requests: int, seed: int, *, reconnect: bool = False, **load: int
    ) -> dict[str, Any]:
        """One load, by clients in a process of their own. `load` are further options of `loadtest.sse_clients`."""
        before = self.cpu_seconds()
        command = [sys.executable, "-m", "loadtest.sse_clients", self.url, "--model", self.model]
        options = {"streams": num_streams, "requests": num_requests, "seed": seed} | load
        command += [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        command += ["--reconnect"] if reconnect else []
        output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, timeout=MEASURE_SECONDS).stdout
        figures: dict[str, Any] = json.loads(output)
        return figures | {"server_cpu_seconds": self.cpu_seconds() - before, "rss_mib": self.rss_mib()}


class Server:
    """A server on a free port of loopback, as a context manager that gives its Target once it is ready.

    `command` and `environment` may hold "{port}". Ready is when `ready_path` answers 200. What the server writes is
    kept aside and shown if it does not become ready within `timeout` seconds. Python may keep what it compiles, as it
    does where a server is installed: else each start would compile everything anew.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        model: str,
        ready_path: str,
        environment: Mapping[str, str] | None = None,
        timeout: float = 120.0,
    ) -> None:
        self.name = name
        self.seconds_to_ready = 0.0  # from exec
        self.seconds_to_answer = 0.0  # from exec to the first answer of any status
        self._command = command
        self._model = model
        self._ready_path = ready_path
        self._environment = environment or {}
        self._timeout = timeout

    def __enter__(self) -> Target:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
        environment |= {key: value.format(port=port) for key, value in self._environment.items()}
        self._output = tempfile.TemporaryFile()  # closed with the server
        started = time.monotonic()
        self._process = subprocess.Popen(
            [word.format(port=port) for word in self._command],
            env=environment, cwd=ROOT, stdout=self._output, stderr=self._output,
        )  # fmt: skip
        self.target = Target(self.name, url, self._model, self._process.pid)
        self.seconds_to_answer = 0.0
        try:
            while (status := _status(url + self._ready_path)) != 200:
                elapsed = time.monotonic() - started
                if status and not self.seconds_to_answer:
                    self.seconds_to_answer = elapsed
                if self._process.poll() is not None or elapsed > self._timeout:
                    raise SystemExit(f"{self.name} did not become ready. It said last:\n{self._log_tail()}")
                time.sleep(POLL_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        self.seconds_to_ready = time.monotonic() - started
        self.seconds_to_answer = self.seconds_to_answer or self.seconds_to_ready
        return self.target

    def __exit__(self, *_: object) -> None:
        """SIGTERM, and SIGKILL for what is left of it after a while."""
        born = {pid: _stat(pid, _START_TIME) for pid in self.target.processes()}
        self.resume()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        for pid, start_time in born.items():
            if start_time and _stat(pid, _START_TIME) == start_time:  # not another process with its number
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()

    def pause(self) -> None:
        """Stop all its processes until `resume`, so that it takes nothing from the one that is measured."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.target.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _log_tail(self) -> str:
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - 3000))
        return self._output.read().decode(errors="replace")


def headrace(name: str, **settings: object) -> Server:
    """Headrace as it lies here, with `settings` that win over those of the environment."""
    environment = {f"HEADRACE_{key.upper()}": str(value) for key, value in settings.items()}
    return Server(
        name,
        [sys.executable, "-m", "app.commands.cli", "serve", "--port", "{port}", "--log-level", "warning"],
        model=str(settings.get("served_model_name", "smollm2-135m-instruct")),
        ready_path="/readyz",
        environment=environment,
    )


def free_port() -> int:
    """Return a free port of loopback."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


def _status(url: str) -> int:
    """Return the status of a GET; 0 without an answer."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        return error.code
    except (urllib.error.URLError, OSError):
        return 0


def _descendants(pid: int) -> list[int]:
    children: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():  # a child belongs to the thread that started it
            children += map(int, (task / "children").read_text().split())
    return [process for child in children for process in (child, *_descendants(child))]


# Fields of /proc/PID/stat, counted from the process's state.
_USER_TIME, _SYSTEM_TIME, _START_TIME = 11, 12, 19


def _stat(pid: int, *fields: int) -> int:
    """The sum of some fields, in ticks; 0 for a process that is gone."""
    try:
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(int(values[field]) for field in fields)


def _cpu_seconds(pid: int) -> float:
    return _stat(pid, _USER_TIME, _SYSTEM_TIME) / os.sysconf("SC_CLK_TCK")


def _rss_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
