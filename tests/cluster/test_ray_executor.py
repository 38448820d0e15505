"""Ranks on a Ray cluster: what they compute is what one worker computes, and one that goes is named at once."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.server.harness import REPOSITORY

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.cluster.executor_process"]
    process = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True)
    return json.loads(process.stdout.splitlines()[-1])


def test_ranks_on_ray_say_what_one_worker_says(found: dict[str, Any]) -> None:
    assert found["same_tokens"]["tokens"] == found["same_tokens"]["expected"]
    assert found["again"] == found["same_tokens"]["expected"]


def test_two_ranks_on_two_machines_say_what_one_worker_says(found: dict[str, Any]) -> None:
    assert found["shared"]["tokens"] == found["shared"]["expected"]


def test_a_rank_that_is_killed_is_named_with_its_machine(found: dict[str, Any]) -> None:
    killed = found["killed"]
    assert killed["kind"] == killed["later"] == "RankLost"
    assert killed["said"].startswith(f"rank 0 on {killed['host']} has ended")


def test_what_a_rank_cannot_load_is_told_as_it_is(found: dict[str, Any]) -> None:
    assert found["refused"].startswith("ConfigError: max_model_len is 1000000000")


def test_no_rank_is_left(found: dict[str, Any]) -> None:
    assert found["left"] == []
