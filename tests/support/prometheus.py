"""A Prometheus with the configuration that is shipped, but one look a second, before a server of the tests.

Its programs are Debian's; `make test-integration` fetches them.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import httpx

from tests.support.harness import REPOSITORY, TIMEOUT

SHIPPED = REPOSITORY / "deploy" / "prometheus"
Result = list[dict[str, Any]]


def program(name: str) -> str:
    """`prometheus` or `promtool`."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert found, "these tests need Prometheus: make prometheus"
    return found


class Prometheus:
    """A context manager. `key` is what the server wants of who reads its metrics. It need not be up yet."""

    def __init__(self, server_port: int, key: str) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="headrace-prometheus-")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._server_port = server_port
        self._key = key
        self._process: subprocess.Popen[bytes] | None = None
        self._client = httpx.Client(base_url=f"http://{self._address}/api/v1", timeout=TIMEOUT, trust_env=False)

    def __enter__(self) -> Self:
        home = Path(self._home.name)
        configuration = (SHIPPED / "prometheus.yml").read_text()
        for shipped, here in (
            ("_interval: 15s", "_interval: 1s"),
            ("127.0.0.1:8000", f"127.0.0.1:{self._server_port}"),
            ("# authorization:", "authorization:"),
        ):
            assert shipped in configuration
            configuration = configuration.replace(shipped, here)
        (home / "prometheus.yml").write_text(configuration)
        (home / "headrace.key").write_text(self._key)
        shutil.copy(SHIPPED / "rules.yaml", home)
        command = [program("prometheus"), "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
        self._process = subprocess.Popen(
            [*command, f"--web.listen-address={self._address}", "--log.level=warn"], cwd=home
        )
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._process is not None
        self._client.close()
        self._process.kill()  # what it has stored is of no use to anybody
        self._process.wait(TIMEOUT)
        self._home.cleanup()

    def query(self, expression: str) -> Result:
        """The samples of an expression now. Asserts that it is one."""
        answer = self._client.get("/query", params={"query": expression})
        assert answer.status_code == 200, (expression, answer.text)
        result = answer.json()["data"]["result"]
        assert isinstance(result, list)
        return result

    def label_values(self, label: str, of: str) -> list[str]:
        values = self._client.get(f"/label/{label}/values", params={"match[]": of}).json()["data"]
        assert isinstance(values, list)
        return values

    def rules(self) -> Result:
        """All rules, with their `query`, `health` and whether they have run."""
        return [rule for group in self._client.get("/rules").json()["data"]["groups"] for rule in group["rules"]]

    def wait_for_looks(self, count: int = 2) -> None:
        """Wait until the server has been read so many times more, and all rules have run since then."""
        wanted = self._looks() + count
        self._wait(lambda: self._looks() >= wanted)
        since = datetime.now(UTC)
        self._wait(lambda: all(datetime.fromisoformat(rule["lastEvaluation"]) > since for rule in self.rules()))

    def _looks(self) -> int:
        try:
            found = self.query("count_over_time(vllm:num_requests_running[1h])")
        except httpx.TransportError:  # it has not begun to listen
            return 0
        return int(found[0]["value"][1]) if found else 0

    def _wait(self, condition: Callable[[], bool]) -> None:
        assert self._process is not None
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert self._process.poll() is None, "Prometheus has ended"
            assert time.monotonic() < deadline, self._client.get("/targets").text
            time.sleep(0.1)
