"""On a CPU, a model of either kind of file is served without torch: it is faster started and smaller.

Asked is a real process what it has mapped, so that nothing escapes that is imported late.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from gpu.checkpoint.hf_config import config_from_hf
from gpu.checkpoint.tensors import tensor_shapes
from gpu.cpu.library import load_library
from tests.selection import slow_except
from tests.support.harness import MODEL, Server
from tests.support.tiny_model import CONFIG, tiny_server, write_tiny_model

pytestmark = pytest.mark.skipif(load_library() is None, reason="torch serves where the library does not run")

KINDS, ENGINES = ("gguf", "safetensors"), ("thread", "process")
MAX_RESIDENT = 250 * 2**20  # bytes, with the embedded model and an empty cache


def safetensors_model(directory: Path) -> Path:
    changes: dict[str, object] = {"hidden_size": 64, "torch_dtype": "float16"}
    write_tiny_model(directory, **changes)
    shapes = tensor_shapes(config_from_hf(CONFIG | changes, source="tiny"))
    generator = np.random.default_rng(0)
    save_file(
        {name: generator.normal(0, 0.1, shape).astype(np.float16) for name, shape in shapes.items()},
        directory / "model.safetensors",
    )
    return directory


def processes(server: Server) -> Iterator[Path]:
    """The server's process and all that it has started, in /proc."""
    assert server._process is not None
    waiting = [server._process.pid]
    while waiting:
        pid = waiting.pop()
        yield Path(f"/proc/{pid}")
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            waiting += map(int, children.read_text().split())


def use_everything(server: Server) -> None:
    """What the sampler and the model have a way for."""
    server.chat("Hello", max_tokens=3, temperature=0.0)
    server.chat("Hello", max_tokens=3, temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, seed=1)
    server.chat("Hello", max_tokens=3, repetition_penalty=1.2, presence_penalty=0.5, logit_bias={"5": 3})
    server.chat("Hello", max_tokens=3, logprobs=True, top_logprobs=5)
    server.chat("Hello", max_tokens=8, response_format={"type": "json_object"})
    for path, body in (
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 1, "echo": True, "logprobs": 2}),
        ("/v1/embeddings", {"input": "Hello"}),
    ):
        assert server.post(path, body).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "engine"),
    slow_except(list(itertools.product(KINDS, ENGINES)), ("gguf", "thread"), ("safetensors", "process")),
)
def test_no_process_of_a_server_loads_torch(kind: str, engine: str, tmp_path: Path) -> None:
    model = MODEL if kind == "gguf" else safetensors_model(tmp_path / "m")
    with Server(model=model, engine=engine, dtype="auto", device="auto", max_model_len=2048) as server:
        use_everything(server.wait_ready())
        found = list(processes(server))
        assert len(found) > (engine == "process")
        for process in found:
            assert "libtorch" not in (process / "maps").read_text()


def test_the_embedded_model_fits_into_250_mb() -> None:
    with Server(dtype="auto") as server:
        server.wait_ready()
        assert server._process is not None
        status = Path(f"/proc/{server._process.pid}/status").read_text()
        (resident,) = (int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:"))
        assert resident < MAX_RESIDENT


def test_where_torch_is_not_installed_a_server_says_what_needs_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    server = tiny_server(dtype="float32")
    server.environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with server:
        assert server.wait_exit() != 0
        last = server.log.strip().splitlines()[-1]
    assert last.startswith("error: dtype is float32: on a CPU it needs torch, which is not installed"), last
