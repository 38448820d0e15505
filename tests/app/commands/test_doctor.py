"""What `headrace doctor` and `headrace config` tell."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.commands.doctor import NOTE, OK, WRONG, _instructions, _network, _other_settings, _packages, _speed
from app.config.settings import Settings
from engine.costs.table import StepCostTable
from gpu.cpu import library
from gpu.cpu.builds import BUILDS
from tests.support.tiny_model import write_tiny_model

HEADRACE = [sys.executable, "-m", "app.commands.cli"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")} | environment
    return subprocess.run([*HEADRACE, *arguments], capture_output=True, text=True, env=env, check=False)


@pytest.mark.slow
@pytest.mark.seconds
def test_a_machine_that_serves_is_told_what_it_can_do() -> None:
    done = run("doctor", "--port", "0", "--kv-cache-memory", "64MiB", "--max-num-seqs", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    told = {line.split()[1]: line for line in done.stdout.splitlines() if line.split()[0] in (OK, NOTE)}
    assert {"machine", "instructions", "device", "network", "model", "speed"} <= set(told)
    assert "KV cache: 64.0 MiB" in told["model"]
    assert "for one stream" in told["speed"]
    assert " for 4; " in told["speed"]


@pytest.mark.slow
@pytest.mark.seconds
def test_a_model_that_cannot_be_served_is_wrong() -> None:
    done = run("doctor", "--port", "0", "--model", "no-such-model")
    assert done.returncode == 1
    assert "wrong  model         There is no model 'no-such-model'." in done.stdout


@pytest.mark.slow
@pytest.mark.seconds
def test_a_template_that_does_not_parse_is_wrong(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    (model / "tokenizer_config.json").write_text('{"chat_template": "{% if %}"}')
    done = run("doctor", "--port", "0", "--model", str(model), "--load-format", "dummy")
    assert done.returncode == 1
    assert "wrong  model         The chat template does not parse" in done.stdout


def test_a_port_in_use_is_wrong() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = list(_network(Settings(port=taken.getsockname()[1])))
    assert [finding.verdict for finding in found] == [WRONG]
    assert "port" in found[0].text


def test_keys_that_cannot_be_read_are_wrong(tmp_path: Path) -> None:
    assert list(_other_settings(Settings())) == []
    [found] = _other_settings(Settings(api_keys_file=tmp_path / "gone.toml"))
    assert (found.verdict, found.text.partition(":")[0]) == (WRONG, "api_keys_file")


def test_more_waiting_requests_than_connections_are_noted() -> None:
    assert [finding.verdict for finding in _network(Settings(port=0, max_connections=100))] == [NOTE]
    assert [finding.verdict for finding in _network(Settings(port=0, max_connections=1000))] == [OK]


def test_a_package_that_is_not_the_tested_one_is_named() -> None:
    assert list(_packages([f"pytest=={pytest.__version__}", "numpy>=1", 'gone==1.0; extra == "dev"'])) == []
    found = list(_packages(["pytest==1.2.3", "hypercorn[trio,uvloop]==0.1", "no-such-package==4"]))
    assert [finding.text.split()[0] for finding in found] == ["pytest", "hypercorn", "no-such-package"]


def test_a_library_that_was_not_built_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usable = [each.name for each in library.usable()]
    assert [finding.text for finding in _instructions()][-1] == BUILDS[usable[0]].instructions
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    found = list(_instructions())
    assert f"the library was not built for {BUILDS[usable[0]].instructions}" in [finding.text for finding in found]
    assert "torch computes" in found[-1].text


@pytest.mark.slow
@pytest.mark.seconds
def test_the_settings_in_force_are_a_settings_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('port = 9001\nserved_model_name = ["one", "zwei"]\nmax_num_seqs = 7\n')
    given = ("--config", str(file), "--max-num-seqs", "9")
    more = {
        "HEADRACE_KV_CACHE_MEMORY": "1.5GiB",
        "HEADRACE_OTLP_ENDPOINT": "https://name:sk-secret@collector/v1/traces",
    }
    done = run("config", *given, HEADRACE_API_KEYS="sk-secret", **more)
    assert done.returncode == 0
    assert "sk-secret" not in done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert f"port = 9001  # port in {file}" in lines
    assert "max_num_seqs = 9  # --max-num-seqs" in lines
    assert "# api_keys is set and not shown  # HEADRACE_API_KEYS" in lines
    assert "# otlp_endpoint is set and not shown  # HEADRACE_OTLP_ENDPOINT" in lines
    assert 'worker_class = "uvloop"  # default' in lines
    assert len(lines) == len(Settings.model_fields)
    again = tmp_path / "again.toml"
    again.write_text(done.stdout)
    assert tomllib.loads(run("config", "--config", str(again)).stdout) == tomllib.loads(done.stdout)
    few = run("config", *given, "--given").stdout.splitlines()
    assert [line.split()[0] for line in few] == ["served_model_name", "max_num_seqs", "port"]


@pytest.mark.seconds
def test_a_reader_that_has_enough_is_no_traceback() -> None:
    command = subprocess.Popen([*HEADRACE, "config"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert command.stdout is not None
    command.stdout.close()
    _, errors = command.communicate(timeout=60)
    assert (command.returncode, errors) == (141, b"")


def test_prompts_that_were_not_measured_are_not_said_to_take_no_time() -> None:
    costs = StepCostTable.unknown(64, 512)
    costs.decode.begin(1, 0.01)
    core: Any = SimpleNamespace(prepare=lambda: False, costs=costs)
    assert "the first token of a prompt of 1,024 was not measured in time" in next(_speed(core, Settings())).text
