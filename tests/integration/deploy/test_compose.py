"""The compose files hold to the compose specification, name what there is, and give a server the time that it needs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.config.settings import ENV_PREFIX, Settings
from app.config.sources import env_name
from tests.integration.deploy.dockerfile import DEPLOY

FILES = sorted(DEPLOY.glob("compose*.yaml"))
CLOSING = 13  # seconds after the drain: Hypercorn's graceful and shutdown timeouts, in deploy/hypercorn.toml

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


def conforms(path: Path) -> bool:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def servers(path: Path) -> dict[str, dict[str, Any]]:
    services = yaml.safe_load(path.read_text())["services"]
    return {name: service for name, service in services.items() if service["image"] == "headrace"}


@each_file
def test_it_holds_to_the_specification(path: Path) -> None:
    assert conforms(path)


def test_the_specification_is_asked(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((DEPLOY / "compose.yaml").read_text().replace("read_only", "readonly"))
    assert not conforms(wrong)


@each_file
def test_what_it_sets_and_mounts_is_there(path: Path) -> None:
    text = path.read_text()
    assert set(re.findall(rf"\b{ENV_PREFIX}\w+", text)) <= {env_name(name) for name in Settings.model_fields}
    mounted = re.findall(r"[\[ \"](\./[\w./-]+):/", text)
    assert [name for name in mounted if not (path.parent / name).exists()] == []


@each_file
def test_servers_are_confined_and_have_time_to_drain(path: Path) -> None:
    assert servers(path)
    for service in servers(path).values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert "/tmp" in service["tmpfs"]
        grace = int(service["stop_grace_period"].removesuffix("s"))
        assert grace >= Settings.model_fields["drain_timeout"].default + CLOSING
