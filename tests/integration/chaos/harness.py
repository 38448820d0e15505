"""Servers that fail on command, with a model so small that a step takes a millisecond.

`ChaosServer` is `tests.support.harness.Server` with `faults`. `Stream` is one client of it, on a connection of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from tests.integration.chaos.faulty import DEVICE_VARIABLE, FAULTS_VARIABLE, Faults
from tests.support.harness import REPOSITORY, Server
from tests.support.raw_client import sse_events
from tests.support.tiny_model import write_tiny_model

Start = Literal["hypercorn", "hypercorn.toml", "serve"]
"""How a server is run: `hypercorn app:main`, the same with the shipped configuration, or `headrace serve`."""


class ChaosServer(Server):
    """A small server that does as `faults` says. `device="simulated"` starts in no time."""

    def __init__(
        self,
        worker_class: str = "uvloop",
        start: Start = "hypercorn",
        *,
        device: str = "cpu",
        flags: tuple[str, ...] = (),  # of Hypercorn
        **settings: object,
    ) -> None:
        usual = {"model": tiny_model(device), "load_format": "dummy", "kv_cache_memory": "64MiB", "max_model_len": 8192}
        super().__init__(worker_class, **(usual | settings))
        self._start = start
        self._flags = flags
        self._folder = TemporaryDirectory(prefix="headrace-chaos-")
        self.faults = Faults(Path(self._folder.name) / "faults.json")
        self.environment = {FAULTS_VARIABLE: str(self.faults.path), DEVICE_VARIABLE: device}

    def command(self) -> list[str]:
        if self._start == "serve":
            return [
                "tests.integration.chaos.faulty",
                "serve",
                "--port",
                str(self.port),
                "--worker-class",
                self.worker_class,
            ]
        config = ["--config", str(REPOSITORY / "deploy/hypercorn.toml")] if self._start == "hypercorn.toml" else []
        flags = ["--bind", f"127.0.0.1:{self.port}", "--worker-class", self.worker_class, *self._flags]
        return ["hypercorn", *config, *flags, "tests.integration.chaos.faulty:main"]

    def __exit__(self, *exc_info: object) -> None:
        self.faults.clear()
        super().__exit__(*exc_info)
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        """Of the process that was started."""
        assert self._process is not None
        return self._process.pid

    @property
    def num_open_files(self) -> int:
        """Descriptors of the process that was started."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def stream(self, name: str, **fields: Any) -> Stream:
        """Start a stream. Its name becomes part of its id in the engine, and its prompt."""
        return Stream(self, name, fields)

    def text_alone(self, name: str, max_tokens: int) -> str:
        """What a request of this name reads that has the server for itself. Call it when nothing else runs."""
        return self.complete(prompt_of(name), max_tokens=max_tokens, ignore_eos=True)["choices"][0]["text"]


class Stream:
    """A greedy streamed completion and what has come of it: `text`, `error`, and whether it is `done`."""

    def __init__(self, server: ChaosServer, name: str, fields: dict[str, Any]) -> None:
        self.name = name
        self.text = ""
        self.error: dict[str, Any] | None = None
        self.done = False
        self.status: int | None = None
        self.client = server.connect(receive_buffer=fields.pop("receive_buffer", None))
        body = {"prompt": prompt_of(name), "temperature": 0, "ignore_eos": True, "max_tokens": 32, "stream": True}
        self.client.post("/v1/completions", body | fields, {"x-request-id": name})
        self._events = self._listen()

    def read(self) -> Stream:
        """To the end. A connection that just ends leaves neither `error` nor `done`."""
        for _ in self._events:
            pass
        return self

    def read_some(self) -> Stream:
        """Up to the next piece of text."""
        before = self.text
        while self.text == before:
            next(self._events)
        return self

    def read_event(self) -> None:
        """The next event, if there is one left."""
        next(self._events, None)

    def close(self) -> None:
        self.client.leave_with_rst()

    def _listen(self) -> Iterator[None]:
        self.status = self.client.read_head().status_code
        if self.status != 200:  # nothing had been sent when it failed
            self.error = json.loads(self.client.read_body())["error"]
            return
        for event in sse_events(self.client.chunks()):
            assert not self.done, "something came after the end"
            if isinstance(event, str):
                self.done = True
            elif "error" in event:
                self.error = event["error"]
            else:
                self.text += "".join(choice["text"] for choice in event["choices"])
            yield


def prompt_of(name: str) -> list[int]:
    """Eight tokens that no other name has."""
    return [1000 + 7 * byte for byte in name.encode().ljust(8, b"_")[-8:]]


@cache
def tiny_model(device: str) -> Path:
    words = {"vocab_size": 4096} if device == "simulated" else {}  # to start in no time
    return write_tiny_model(Path(_home().name) / device, hidden_size=64, tie_word_embeddings=False, **words)


@cache
def _home() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="headrace-chaos-model-")
