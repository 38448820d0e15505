"""Measure how much of a router's view of prefix caches is wrong, and how soon it is corrected.

    python -m loadtest.prefix_beliefs [--rounds 20] [--model smollm2-135m-instruct]

Two engines in processes of their own behind one front end. Prompts come that evict one another; of each it is noted
how much of it was believed to be where it went, and how much was found there. Then in each round one of them loses what
it held: its cache is cleared, the same while its events are lost, or it is killed. Prints of each
the seconds until nothing is believed any more that is not there.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import anyio

from app.config.settings import Settings
from app.serving.loading import make_client, open_files
from engine.commands import Event, ResetPrefixCache
from engine.frontend.async_llm import AsyncLLM
from engine.kv_events import PrefixHashes
from engine.messages import EngineCoreOutputs, EngineCoreRequest, SamplingParams
from engine.transport.data_parallel import DataParallelClient, Replica

NUM_PREFIXES, PREFIX_TOKENS = 40, 256  # as many as the caches of both hold
PROMPTS_AT_ONCE = 16


class Fleet:
    """Two engines, and what is known of them."""

    def __init__(self, client: DataParallelClient, llm: AsyncLLM) -> None:
        self.client, self.llm = client, llm
        self.num_believed = self.num_wrong = self.num_requests = 0
        self.loses = False
        self._expected: dict[str, int] = {}  # chunks of a prompt that its engine is believed to hold
        self._take, self._choose = client._take, client._router.choose
        client._take = self._lossy  # type: ignore[method-assign]
        client._router.choose = self._noting  # type: ignore[method-assign]

    def believed(self, engine: int) -> set[int]:
        return self.client._router.index._chunks.get(engine, set())

    async def prefill(self, number: int) -> None:
        """Prompts that begin like others."""

        async def ask() -> None:
            self.num_requests += 1
            prompt = [random.randrange(NUM_PREFIXES)] * PREFIX_TOKENS + random.choices(range(1000), k=40)
            request = EngineCoreRequest(
                request_id=str(self.num_requests),
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=1),
                arrival_time=time.monotonic(),
            )
            async with self.llm.stream(request) as stream:
                async for _ in stream:
                    pass

        async with anyio.create_task_group() as tasks:
            for _ in range(number):
                tasks.start_soon(ask)

    async def seconds_until(self, is_known: Callable[[], bool]) -> float:
        began = time.monotonic()
        while not is_known():  # noqa: ASYNC110
            await anyio.sleep(0.001)
        return time.monotonic() - began

    def _lossy(self, replica: Replica, event: Event) -> list[Event]:
        if isinstance(event, EngineCoreOutputs):
            if self.loses:
                event.kv_events = None
            for output in event.outputs:
                expected = self._expected.pop(output.request_id, 0)
                found = output.num_cached_tokens // self.client._router.chunk_size
                self.num_believed += expected
                self.num_wrong += max(0, expected - found)
        return self._take(replica, event)

    def _noting(self, request_ids: Sequence[str], prompt: Sequence[int], alive: Sequence[int], **options: Any) -> int:
        engine, router = self._choose(request_ids, prompt, alive, **options), self.client._router
        hashes = PrefixHashes(router.key, router.chunk_size, options["tenant"], options["salt"])
        while len(hashes.hashes) < (len(prompt) - 1) // router.chunk_size and hashes.extend(prompt) in self.believed(
            engine
        ):
            self._expected[request_ids[0]] = len(hashes.hashes)
        return engine


async def measure(rounds: int, settings: Settings) -> None:
    files = open_files(settings, None)
    client = cast(DataParallelClient, make_client(settings, files, lambda phase, done, total: None))
    llm = AsyncLLM(client, files.tokenizer)
    async with llm.running():
        await llm.wait_ready()
        fleet, index = Fleet(client, llm), client._router.index
        for _ in range(rounds):
            await fleet.prefill(PROMPTS_AT_ONCE)
        share = fleet.num_wrong / max(fleet.num_believed, 1)
        print(
            f"under load: of {fleet.num_believed} chunks believed to be there {fleet.num_wrong} were not ({share:.2%})"
        )
        for what in ("cleared", "cleared, and that was lost", "killed"):
            seconds = []
            for _ in range(rounds if what != "killed" else max(1, rounds // 4)):
                await fleet.seconds_until(lambda: index.publishes(0) and index.publishes(1))
                await fleet.prefill(PROMPTS_AT_ONCE)
                await fleet.seconds_until(lambda: bool(fleet.believed(0)))
                if what == "killed":
                    pid = client.replicas[0].client.pid
                    assert pid is not None
                    os.kill(pid, signal.SIGKILL)
                else:
                    fleet.loses = what != "cleared"
                    client.send(ResetPrefixCache())
                seconds.append(await fleet.seconds_until(lambda: not fleet.believed(0)))
                fleet.loses = False
            middle, most = statistics.median(seconds), max(seconds)
            print(f"{what}: known after {middle:.3f} s (median), {most:.3f} s (most) of {len(seconds)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    options = parser.parse_args()
    sizes: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory": "128MiB", "num_threads": 1, "max_num_seqs": 8}
    settings = Settings(model=options.model, engine="process", data_parallel_size=2, **sizes)
    anyio.run(measure, options.rounds, settings)


if __name__ == "__main__":
    main()
