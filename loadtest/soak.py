"""Run all kinds of requests for hours, and check that the server's resources do not grow.

    python -m loadtest.soak --hours 1                       the embedded model, on this machine
    python -m loadtest.soak --hours 0.02 --cycle 20         a minute, to see what it does
    python -m loadtest.soak --hours 1 --json FILE           with every sample

Clients that chat, leave in the middle, read slowly, hold conversations, want JSON, tools, embeddings or several
choices, look at the dashboard's feed, and send wrong requests, while tenants change (SIGHUP), and the log level.
After each cycle everybody ends, and what the server holds is looked at: memory, descriptors, threads, KV blocks, time
series. What was seen in the second third of the time must not have grown in the last one. The exit code is 1 if
something has, or if an answer was not what it should be.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from app.client import ServerClient, ServerError
from app.workload.datasets import WORDS
from loadtest.servers import Target, headrace

ADMIN = "soak-admin"
KEYS = ("soak-one", "soak-two", "soak-three")
MEMORY_GROWTH = 0.01
SETTLE_SECONDS = 120.0  # for what still runs when the clients of a cycle have ended
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
WRONG: list[tuple[str, bytes]] = [
    ("/v1/chat/completions", b"{"),
    ("/v1/chat/completions", b'{"messages": []}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "temperature": 9}'),
    ("/v1/completions", b'{"prompt": [999999999]}'),
    ("/v1/completions", b'{"prompt": "x", "model": "no-such-model"}'),
    ("/v1/completions", b'{"prompt": "x", "max_tokens": -2}'),
    ("/v1/embeddings", b'{"input": []}'),
    ("/v1/no/such/path", b"{}"),
    ("/v1/completions", b'{"prompt": "x", "guided_regex": "("}'),
]


class Soak:
    """Clients of one server. Counts what they saw; what they should not have seen is in `faults`."""

    def __init__(self, target: Target, tenants: Path) -> None:
        self.count: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self._target = target
        self._tenants = tenants
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def cycle(self, seconds: float, seed: int) -> None:
        """Load for so long, and wait until everybody has ended."""
        self._stop.clear()
        clients = [threading.Thread(target=self._client, args=(seed * 100 + number,)) for number in range(12)]
        for client in clients:
            client.start()
        end = time.monotonic() + seconds
        change = 0
        while time.monotonic() < end:
            change += 1
            self.change(seed * 100 + change)
            self._stop.wait(min(5.0, max(0.0, end - time.monotonic())))
        self._stop.set()
        for client in clients:
            client.join()

    def change(self, seed: int) -> None:
        """Other weights and limits for the tenants, and another log level."""
        write_tenants(self._tenants, random.Random(seed))
        assert self._target.pid is not None
        os.kill(self._target.pid, signal.SIGHUP)
        level = ("warning", "error")[seed % 2]
        self._post("/configure_logging", {"log_level": level}, ADMIN)

    def _client(self, seed: int) -> None:
        draw = random.Random(seed)
        kinds: list[tuple[int, str, Callable[[random.Random], None]]] = [
            (6, "chats", self._chat),
            (5, "left", self._leave),
            (2, "conversations", self._converse),
            (2, "wrong", self._wrong),
            (1, "structured", self._structured),
            (1, "tools", self._tools),
            (1, "choices", self._choices),
            (1, "embeddings", self._embed),
            (1, "slow", self._read_slowly),
            (1, "looks", self._look),
        ]
        while not self._stop.is_set():
            _, name, act = draw.choices(kinds, [weight for weight, *_ in kinds])[0]
            try:
                act(draw)
                self._note(self.count, name)
            except ServerError as error:
                if error.status not in (429, 503):
                    self._note(self.faults, f"{name}: {error}")
                self._note(self.count, "refused")
                self._stop.wait(1.0)
            except (OSError, AssertionError, ValueError, KeyError) as error:
                self._note(self.faults, f"{name}: {type(error).__name__} {error}")

    def _note(self, counter: Counter[str], what: str) -> None:
        with self._lock:
            counter[what] += 1

    def _client_of(self, key: str) -> ServerClient:
        return ServerClient(self._target.url, key, timeout=120.0)

    def _post(self, path: str, body: dict[str, Any], key: str) -> dict[str, Any]:
        """Raises ServerError for any status but 200."""
        with self._client_of(key).request("POST", path, body) as response:
            found: dict[str, Any] = json.load(response)
        return found

    # --- what clients do

    def _chat(self, draw: random.Random) -> None:
        body = message(draw, 4, 120) | {"max_tokens": draw.randint(1, 48)}
        for _ in self._client_of(draw.choice(KEYS)).stream(body):
            pass

    def _leave(self, draw: random.Random) -> None:
        body = message(draw, 4, 600) | {"max_tokens": 2000, "ignore_eos": True}
        stream = self._client_of(draw.choice(KEYS)).stream(body)
        for _ in itertools.islice(stream, draw.randint(1, 20)):
            pass
        stream.close()

    def _converse(self, draw: random.Random) -> None:
        messages = message(draw, 20, 60)["messages"]
        for _ in range(draw.randint(2, 4)):
            body = {"messages": messages, "max_tokens": 16}
            said = self._post("/v1/chat/completions", body, draw.choice(KEYS))["choices"][0]["message"]
            messages = [
                *messages,
                {"role": "assistant", "content": said["content"] or ""},
                *message(draw, 2, 9)["messages"],
            ]

    def _wrong(self, draw: random.Random) -> None:
        path, body = draw.choice(WRONG)
        client = self._client_of(draw.choice([*KEYS, "no-key"]))
        with client.request("POST", path, body, check=False) as response:
            if not 400 <= response.status < 500 or b"message" not in response.read():
                raise ValueError(f"{path} {body[:40]!r} got {response.status}")

    def _structured(self, draw: random.Random) -> None:
        format_ = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
        body = message(draw, 4, 20) | {"max_tokens": 60, "response_format": format_}
        choice = self._post("/v1/chat/completions", body, draw.choice(KEYS))["choices"][0]
        if choice["finish_reason"] == "stop":
            assert "city" in json.loads(choice["message"]["content"])

    def _tools(self, draw: random.Random) -> None:
        body = message(draw, 4, 20) | {"max_tokens": 60, "tools": [TOOL], "tool_choice": "required"}
        self._post("/v1/chat/completions", body, draw.choice(KEYS))

    def _choices(self, draw: random.Random) -> None:
        body = message(draw, 4, 60) | {"n": 3, "max_tokens": 12, "logprobs": True, "top_logprobs": 3}
        assert len(self._post("/v1/chat/completions", body, draw.choice(KEYS))["choices"]) == 3

    def _embed(self, draw: random.Random) -> None:
        texts = [text(draw, 3, 40) for _ in range(draw.randint(1, 5))]
        assert len(self._post("/v1/embeddings", {"input": texts}, draw.choice(KEYS))["data"]) == len(texts)

    def _look(self, draw: random.Random) -> None:
        with self._client_of(ADMIN).request("GET", "/dashboard/frames") as feed:
            for _ in range(draw.randint(1, 40)):
                if self._stop.is_set():  # an idle server sends few frames
                    break
                feed.readline()

    def _read_slowly(self, draw: random.Random) -> None:
        """Some bytes now and then, and a reset in the end."""
        url = urlsplit(self._target.url)
        body = json.dumps(message(draw, 4, 20) | {"max_tokens": 200, "stream": True}).encode()
        with closing(socket.create_connection((url.hostname or "", url.port or 80))) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {draw.choice(KEYS)}\r\n"
            sock.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            for _ in range(draw.randint(1, 8)):
                sock.recv(64)
                self._stop.wait(0.3)


def text(draw: random.Random, least: int, most: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))


def message(draw: random.Random, least: int, most: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text(draw, least, most)}]}


def write_tenants(path: Path, draw: random.Random) -> None:
    """Replace the file atomically, as an operator's tool would."""
    tenants = [
        f'[tenants.team-{number}]\nkeys = ["{key}"]\nweight = {draw.choice((0.5, 1.0, 4.0))}\n'
        f"max_running = {draw.randint(4, 16)}\n"
        for number, key in enumerate(KEYS)
    ]
    draft = path.with_suffix(".new")
    draft.write_text("\n".join(tenants))
    draft.chmod(0o600)
    draft.rename(path)


def look_at(target: Target) -> dict[str, float]:
    """Return the resources of the idle server. Raises TimeoutError if it does not become idle."""
    end = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < end:
        metrics = ServerClient(target.url, ADMIN, timeout=30).get("/metrics").decode()
        busy = re.findall(r"^vllm:(?:num_requests_\w+|kv_cache_usage_perc)\{[^}]*\} (\S+)$", metrics, re.MULTILINE)
        assert len(busy) >= 3
        if not any(map(float, busy)):
            break
        time.sleep(0.1)
    else:
        raise TimeoutError(f"something ran {SETTLE_SECONDS:.0f} s after everybody had left")
    time.sleep(1.0)  # connections and threads that are on their way out
    processes = target.processes()
    return {
        "rss_mib": target.rss_mib(),
        "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in processes),
        "threads": sum(len(os.listdir(f"/proc/{pid}/task")) for pid in processes),
        "series": sum(not line.startswith("#") for line in metrics.splitlines()),
    }


def judge(samples: list[dict[str, float]]) -> list[str]:
    """Return the figures that grew from the second third of the samples to the last."""
    third = len(samples) // 3
    before, after = samples[third : 2 * third], samples[2 * third :]
    grown = []
    for name, allowed in (("rss_mib", MEMORY_GROWTH), ("descriptors", 0.0), ("threads", 0.0), ("series", 0.0)):
        first, last = (statistics.median(sample[name] for sample in part) for part in (before, after))
        if last > first * (1 + allowed):
            grown.append(f"{name} from {first:,.1f} to {last:,.1f}")
    return grown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--cycle", type=float, default=60.0, help="seconds of load between two looks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    samples: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        tenants = Path(folder) / "tenants.toml"
        write_tenants(tenants, random.Random(options.seed))
        settings = {"max_num_seqs": 16, "kv_cache_memory": "192MiB", "timeline_size": 200}
        kept = {"kv_cache_dir": Path(folder) / "kv", "kv_cache_dir_size": "64MiB"}
        with headrace("headrace", api_keys_file=tenants, admin_keys=ADMIN, **settings, **kept) as target:
            soak = Soak(target, tenants)
            end = time.monotonic() + options.hours * 3600
            while time.monotonic() < end or len(samples) < 3:
                soak.cycle(options.cycle, options.seed * 10_000 + len(samples))
                samples.append(look_at(target) | {"requests": sum(soak.count.values())})
                told = ", ".join(f"{name} {value:,.0f}" for name, value in samples[-1].items())
                print(f"{len(samples):4}: {told}, faults {dict(soak.faults)}", flush=True)
            if options.json is not None:
                told_all = {"samples": samples, "count": soak.count, "faults": soak.faults}
                options.json.write_text(json.dumps(told_all, indent=1))
    print(f"answered: {dict(soak.count)}")
    wrong = [f"{number} times {what}" for what, number in soak.faults.items()] + judge(samples)
    print("\n".join(wrong) or "nothing has grown, and every answer was what it should be")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
