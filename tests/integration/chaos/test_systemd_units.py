"""The shipped units are as tight as docs/deploy.md says, and a server works in them."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.chaos.harness import ChaosServer
from tests.support.harness import REPOSITORY

UNITS = REPOSITORY / "deploy/systemd"
MOST_EXPOSED = 20  # tenths, of at most 100


class SandboxedServer(ChaosServer):
    """A server with a small model under the system call filter of headrace.service."""

    def command(self) -> list[str]:
        return ["tests.integration.chaos.sandboxed", str(UNITS / "headrace.service"), *super().command()]


@pytest.mark.parametrize("names", [["headrace.service"], ["headrace@.service"], ["headrace.service", "gpu.conf"]])
def test_systemd_finds_little_exposed(tmp_path: Path, names: list[str]) -> None:
    unit = tmp_path / names[0]
    unit.write_text("".join((UNITS / name).read_text() for name in names))
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={MOST_EXPOSED}", str(unit)]
    judged = subprocess.run(command, capture_output=True, text=True, check=False)
    assert judged.returncode == 0, judged.stdout + judged.stderr


def test_both_services_differ_by_their_port_alone() -> None:
    one, several = ((UNITS / name).read_text() for name in ("headrace.service", "headrace@.service"))
    assert one.partition("# What it may see")[1:] == several.partition("# What it may see")[1:]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter is written for x86-64")
def test_a_server_works_within_what_the_unit_allows() -> None:
    """With an engine in a process, which asks the system for more than one in a thread."""
    with SandboxedServer(engine="process") as server:
        server.wait_ready()
        schema: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        assert server.chat("Hi", max_tokens=20, response_format=form)["usage"]["completion_tokens"] > 0
        status = Path(f"/proc/{server.pid}/status").read_text()
        assert "Seccomp:\t2" in status
        assert "NoNewPrivs:\t1" in status
        assert "Traceback" not in server.log
