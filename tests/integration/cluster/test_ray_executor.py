"""Ranks on a Ray cluster: what they compute is what one worker computes, and one that goes is named at once."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from gpu.parallel.ray_ranks import SILENCE_SECONDS
from tests.support.harness import REPOSITORY


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.integration.cluster.executor_process"]
    process = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True)
    return json.loads(process.stdout.splitlines()[-1])


def test_stages_on_two_machines_say_what_one_worker_says(found: dict[str, Any]) -> None:
    """Computed by the library, whose tensor ranks share the memory of their machine."""
    first, second, third, fourth = found["stages"]["nodes"]
    assert first == second != third == fourth
    assert found["stages"]["tokens"] == found["stages"]["expected"] == found["again"]


def test_two_ranks_on_two_machines_say_what_one_worker_says(found: dict[str, Any]) -> None:
    assert len(set(found["shared"]["nodes"])) == 2
    assert found["shared"]["tokens"] == found["shared"]["expected"]


def test_a_rank_that_is_killed_is_named_with_its_machine(found: dict[str, Any]) -> None:
    killed = found["killed"]
    assert killed["kind"] == killed["later"] == "RankLost"
    assert killed["said"].startswith(f"rank {killed['victim']} on {killed['host']} has ended")
    assert killed["seconds"] < SILENCE_SECONDS, "it was its silence that told"


def test_what_a_rank_cannot_load_is_told_as_it_is(found: dict[str, Any]) -> None:
    assert found["refused"].startswith("ConfigError: tensor_parallel_size is 2: tensor ranks of the C++ library share")


def test_no_rank_is_left(found: dict[str, Any]) -> None:
    assert found["left"] == []
