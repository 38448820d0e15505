"""`headrace bench startup`: from exec of `headrace serve` to its first answer, to ready, to the first token.

Cold: there are no compiled Python files or kernels, and the weights are not in the page cache, as far as a user can
evict them. Warm: a start after another one.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ByteSize, SecretStr

from app.bench.offline import percentiles_of, write_json
from app.client import ServerClient, ServerError
from app.config.settings import Settings, SettingsError
from app.config.sources import env_name, shown
from app.workload.report import output_file
from gpu.checkpoint import open_model, weight_paths

POLL_SECONDS = 0.01
LONGEST_START = 600.0  # seconds
PHASES = {"answer": "first answer", "startup": "ready", "first_token": "first token"}


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of vLLM's `bench startup`."""
    group = parser.add_argument_group("starts")
    group.add_argument("--num-iters-cold", type=int, default=3, metavar="N", help="Default: 3.")
    group.add_argument(
        "--num-iters-warmup", type=int, default=1, metavar="N", help="Starts before the warm ones. Default: 1."
    )
    group.add_argument("--num-iters-warm", type=int, default=3, metavar="N", help="Default: 3.")
    group.add_argument("--output-json", type=output_file, metavar="FILE", help="Write the result.")


def run(
    settings: Settings, *, num_iters_cold: int, num_iters_warmup: int, num_iters_warm: int, output_json: Path | None
) -> int:
    """Measure the starts, after fetching the model if it is missing."""
    weights = weight_paths(
        open_model(settings.model_source, cache_dir=settings.cache_dir, load_format=settings.load_format)
    )
    taken: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(num_iters_cold):
        with TemporaryDirectory() as empty:
            _put_out_of_memory(weights)
            caches = ("PYTHONPYCACHEPREFIX", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
            taken["cold"].append(_start(settings, dict.fromkeys(caches, empty)))
    for _ in range(num_iters_warmup):
        _start(settings, {})
    taken["warm"] = [_start(settings, {}) for _ in range(num_iters_warm)]
    result: dict[str, Any] = {}
    for kind, starts in taken.items():
        for phase, title in PHASES.items():
            if times := [start[phase] for start in starts]:
                result[f"avg_{kind}_{phase}_time"] = statistics.fmean(times)
                result[f"{kind}_{phase}_times"] = times
                result[f"{kind}_{phase}_percentiles"] = percentiles_of(times)
                print(
                    f"{kind}, exec to {title}: {statistics.fmean(times):.2f} s ({min(times):.2f} to {max(times):.2f})"
                )
    write_json(output_json, {"model_id": settings.model, **result})
    return 0


def _start(settings: Settings, environment: dict[str, str]) -> dict[str, float]:
    """Return seconds from exec to each phase. Raises SettingsError if the server ends earlier."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {env_name(name): _text(getattr(settings, name)) for name in settings.model_fields_set}
    given |= {env_name("host"): "127.0.0.1", env_name("port"): str(port), env_name("log_level"): "error"}
    given["PYTHONDONTWRITEBYTECODE"] = ""  # an installed server has its compiled files
    key = settings.api_keys[0].get_secret_value() if settings.api_keys else None
    client = ServerClient(f"http://127.0.0.1:{port}", key, timeout=LONGEST_START)
    reached: dict[str, float] = {}
    began = time.perf_counter()
    command = [sys.executable, "-m", "app.commands.cli", "serve"]
    with subprocess.Popen(command, env=os.environ | given | environment, stdout=subprocess.DEVNULL) as server:  # noqa: S603
        try:
            while "startup" not in reached:
                status = _status(client)
                now = time.perf_counter() - began
                if status:
                    reached.setdefault("answer", now)
                if status == 200:
                    reached["startup"] = now
                elif server.poll() is not None or now > LONGEST_START:
                    raise SettingsError("The server did not become ready; its last messages are above.")
                else:
                    time.sleep(POLL_SECONDS)
            body = {"model": settings.model_names[0], "prompt": "Once upon a time", "max_tokens": 1}
            with client.request("POST", "/v1/completions", body) as answer:
                answer.read()
            reached["first_token"] = time.perf_counter() - began
        finally:
            server.terminate()
    return reached


def _status(client: ServerClient) -> int:
    """Return the status of /readyz; 0 without an answer."""
    with suppress(ServerError), client.request("GET", "/readyz", check=False) as answer:
        return answer.status
    return 0


def _put_out_of_memory(files: Sequence[Path]) -> None:
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _text(value: object) -> str:
    """Return a setting's value in the form of its environment variable."""
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, dict):
        return json.dumps(value)
    return str(int(value)) if isinstance(value, ByteSize) else shown(value)  # `shown` rounds sizes
