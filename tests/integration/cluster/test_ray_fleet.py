"""A server whose engines have their ranks on the machines of a Ray cluster."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster.cluster import RayCluster, cluster, parent
from tests.integration.cluster.streams import keep_busy, num_streamed
from tests.support.harness import REPOSITORY, TIMEOUT, Server
from tests.support.raw_client import sse_events
from tests.support.tiny_model import tiny_server, write_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PROMPT = list(range(1000, 1020))
NUM_TOKENS = 8000  # of a stream that outlives the fleet's size


class HurriedServer(Server):
    def command(self) -> list[str]:
        return [*super().command()[:-1], "tests.integration.cluster.hurried:main"]


@pytest.fixture(scope="module")
def machines() -> Iterator[RayCluster]:
    with cluster(1, 1) as started:
        yield started


@pytest.fixture(scope="module")
def server(machines: RayCluster) -> Iterator[Server]:
    fleet = tiny_server(executor="ray", data_parallel_size=2, num_threads=1)  # device=auto: none has a GPU
    fleet.environment["RAY_ADDRESS"] = machines.address
    with fleet:
        yield fleet.wait_ready()


def test_engines_on_a_cluster_say_what_one_here_says(server: Server, machines: RayCluster) -> None:
    assert len({parent(rank) for rank in machines.ranks()}) == 2, "each on a machine of its own"
    body = {"max_tokens": 30, "ignore_eos": True, "return_token_ids": True}
    there = [server.complete(PROMPT, **body)["choices"][0]["token_ids"] for _ in range(2)]
    with tiny_server(device="cpu") as here:
        assert there == [here.wait_ready().complete(PROMPT, **body)["choices"][0]["token_ids"]] * 2


LIBRARY = """
import asyncio, sys
from headrace import AsyncLLM, SamplingParams

async def run():
    small = {"kv_cache_memory": "4MiB", "max_model_len": 256, "num_threads": 1, "progress": False}
    async with AsyncLLM(sys.argv[1], load_format="dummy", executor="ray", **small) as llm:
        async with llm.generate("The sea", SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)) as outputs:
            async for output in outputs:
                pass
        print(len(output.choices[0].token_ids))

asyncio.run(run())
"""


def test_a_program_has_its_model_on_a_cluster_too(tmp_path: Path) -> None:
    with cluster(1) as machines:
        done = subprocess.run(
            [sys.executable, "-c", LIBRARY, write_tiny_model(tmp_path / "tiny")],
            env=os.environ | {"RAY_ADDRESS": machines.address},
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert (done.stdout, done.returncode) == ("8\n", 0), done.stderr
        assert machines.ranks() == []


def errors_of(events: Iterator[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, dict) and "error" in event]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_is_lost_is_named_and_comes_back(server: Server, machines: RayCluster, sent: signal.Signals) -> None:
    server.wait_idle()
    events: list[Iterator[Any]] = []
    # Two are enough, unless the measured step costs make one engine look much faster than the other.
    load = re.compile(r'^headrace:engine_load_seconds{engine="\d"} (\S+)$', re.MULTILINE)
    while not all(map(float, load.findall(server.client.get("/metrics").text))):
        assert len(events) < 40, "one engine gets no stream"
        client = server.connect()
        prompt = [len(events) * 1000 + each for each in range(1, 20)]
        client.post("/v1/completions", {"prompt": prompt, "max_tokens": 8000, "ignore_eos": True, "stream": True})
        assert client.read_head().status_code == 200
        events.append(sse_events(client.chunks()))
        next(events[-1])
    before = machines.ranks()
    with ThreadPoolExecutor(len(events)) as readers:  # the server drops clients that do not read
        reading = [readers.submit(errors_of, each) for each in events]
        os.kill(before[0], sent)
        server.poll(machines.ranks, lambda now: len(now) == 2 and before[0] not in now, 0.05)
        said = [each.result() for each in reading]
    assert set(map(len, said)) == {0, 1}, "the streams of the other engine go on"
    for [error] in filter(None, said):
        assert f"rank 0 on {os.uname().nodename}" in error["error"]["message"]
    server.wait_ready()
    assert server.complete(PROMPT, max_tokens=3)["usage"]["completion_tokens"] == 3


def test_an_engine_of_several_ranks_has_them_on_several_machines(
    server: Server, machines: RayCluster, tmp_path: Path
) -> None:
    server.stop()
    model = write_tiny_model(tmp_path / "layers", num_hidden_layers=2)
    body = {"max_tokens": 30, "ignore_eos": True, "return_token_ids": True}
    with tiny_server(device="cpu", model=model) as here:
        expected = here.wait_ready().complete(PROMPT, **body)["choices"][0]["token_ids"]
    fleet = tiny_server(executor="ray", pipeline_parallel_size=2, num_threads=1, device="cpu", model=model)
    fleet.environment["RAY_ADDRESS"] = machines.address
    with fleet:
        assert fleet.wait_ready().complete(PROMPT, **body)["choices"][0]["token_ids"] == expected
        assert len({parent(rank) for rank in machines.ranks()}) == 2
        client = fleet.connect()
        client.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 8000, "ignore_eos": True, "stream": True})
        assert client.read_head().status_code == 200
        events = sse_events(client.chunks())
        next(events)
        os.kill(machines.ranks()[0], signal.SIGKILL)
        [error] = [event["error"] for event in events if isinstance(event, dict) and "error" in event]
        assert re.search(rf"rank [01] on {os.uname().nodename} ", error["message"])
        fleet.poll(lambda: fleet.log, lambda log: "runs again" in log)
        assert fleet.wait_ready().complete(PROMPT, **body)["choices"][0]["token_ids"] == expected


@pytest.mark.storm
def test_engines_follow_the_queue_and_no_stream_is_cut(machines: RayCluster, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", vocab_size=4096, max_position_embeddings=16384)
    sizes = {"data_parallel_size": 1, "max_data_parallel_size": 2, "max_num_seqs": 8, "max_queue_time": 0}
    settings: dict[str, Any] = {"load_format": "dummy", "max_model_len": 16384, "kv_cache_memory": "96MiB", **sizes}
    fleet = HurriedServer(model=model, executor="ray", device="cpu", **settings)
    fleet.environment["RAY_ADDRESS"] = machines.address
    with fleet, ThreadPoolExecutor(4) as readers:
        fleet.wait_ready()
        assert len(machines.ranks()) == 1
        alone = _num_blocks(fleet)
        with keep_busy(fleet, 16):
            fleet.poll(fleet.metrics, lambda now: now.samples["headrace:engines"] == 2, 0.1)
            assert _num_blocks(fleet) == 2 * alone
            assert len(machines.ranks()) == 2
            streams = [readers.submit(num_streamed, fleet, number, NUM_TOKENS) for number in range(4)]
        fleet.poll(lambda: fleet.log, lambda log: "Changing the number of engines from 2 to 1" in log, 0.1)
        assert [stream.result() for stream in streams] == [NUM_TOKENS] * 4
        fleet.poll(machines.ranks, lambda now: len(now) == 1, 0.1)
        assert fleet.complete(PROMPT, max_tokens=3)["usage"]["completion_tokens"] == 3
        assert _num_blocks(fleet) == alone
        assert fleet.metrics().finished["error"] == 0


def _num_blocks(server: Server) -> int:
    [labels] = [name for name in server.metrics().samples if name.startswith("vllm:cache_config_info")]
    return int(labels.partition("num_gpu_blocks=")[2].rstrip("}").partition(",")[0])
