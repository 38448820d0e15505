"""What deploy/Dockerfile promises, as far as it can be known without building it; test_image.py builds and runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib

import pytest

from app.config.settings import ENV_PREFIX
from app.config.sources import load_settings
from tests.integration.deploy.dockerfile import (
    DEPLOY,
    Instruction,
    environment,
    health_command,
    last_stage,
    only,
    texts,
)
from tests.support.harness import REPOSITORY, Server

IMAGE = last_stage(DEPLOY / "Dockerfile")
CUDA = last_stage(DEPLOY / "Dockerfile.cuda")


@pytest.mark.parametrize("stage", [IMAGE, CUDA], ids=["cpu", "cuda"])
def test_an_image_runs_as_a_user_whose_number_says_that_it_is_not_root(stage: list[Instruction]) -> None:
    user, _, group = texts(stage, "USER")[-1].partition(":")
    assert int(user) > 0  # Kubernetes' runAsNonRoot believes numbers alone
    assert int(group) > 0


@pytest.mark.parametrize("stage", [IMAGE, CUDA], ids=["cpu", "cuda"])
def test_what_an_image_sets_are_settings(stage: list[Instruction], monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: value for name, value in environment(stage).items() if name.startswith(ENV_PREFIX)}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()  # raises for what is none, and for a value that is not allowed
    assert {name: str(getattr(settings, name.removeprefix(ENV_PREFIX).lower())) for name in given} == given


def test_every_cache_of_the_image_for_cards_lies_in_a_volume() -> None:
    volumes = texts(CUDA, "VOLUME")
    caches = {
        name: value for name, value in (environment(IMAGE) | environment(CUDA)).items() if value.startswith("/var")
    }
    assert set(caches) == {"HEADRACE_CACHE_DIR", "HF_HOME", "TRITON_CACHE_DIR"}
    for folder in caches.values():
        assert any(f"{folder}/".startswith(f"{volume}/") for volume in volumes)


def test_no_shell_stands_between_a_signal_and_the_server() -> None:
    assert only(IMAGE, "ENTRYPOINT").words + only(IMAGE, "CMD").words == ["headrace", "serve"]
    assert only(IMAGE, "STOPSIGNAL").text == "SIGTERM"
    assert only(IMAGE, "EXPOSE").text == environment(IMAGE)["HEADRACE_PORT"]


def test_the_context_has_all_that_is_installed_and_no_tests() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    allowed = {line.removeprefix("!") for line in lines if line.startswith("!")}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    tool = project["tool"]["setuptools"]
    needed = {pattern.removesuffix("*") for pattern in tool["packages"]["find"]["include"]}
    needed |= {f"{module}.py" for module in tool["py-modules"]} | {project["project"]["readme"], "LICENSE"}
    assert needed | {"pyproject.toml", "setup.py", "requirements.lock"} == allowed
    assert all((REPOSITORY / name).exists() for name in allowed)


def test_an_installation_without_extras_has_no_torch() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert not [each for each in project["dependencies"] if each.startswith("torch")]
    assert [each.partition("==")[0] for each in project["optional-dependencies"]["torch"]] == ["torch"]


def test_the_health_check_says_what_readyz_says() -> None:
    command = [sys.executable, *health_command(IMAGE)[1:]]

    def is_healthy(port: int) -> bool:
        found = subprocess.run(command, env=os.environ | {"HEADRACE_PORT": str(port)}, capture_output=True, check=False)
        return found.returncode == 0

    with Server(dtype="float32") as server:  # which takes longest to load
        server.poll(lambda: server.get_or_none("/livez"), lambda answer: answer is not None)
        assert not is_healthy(server.port), "it is still loading"
        server.wait_ready()
        assert is_healthy(server.port)
        assert server.stop() == 0
        assert not is_healthy(server.port)
