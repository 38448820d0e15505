"""A server that cannot start as it was told to says so on its last line and exits; one that can says how far it is.

Every case is a real process. They are started side by side, because nearly all of their time is Python's imports.
"""

from __future__ import annotations

import errno
import itertools
import re
import resource
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app.serving.model_server import _is_lack_of_memory
from tests.selection import slow_except
from tests.support.harness import MODEL, Server
from tests.support.tiny_model import tiny_server, tiny_settings, write_tiny_model

AT_ONCE = 3


class HeadraceServe(Server):
    """`headrace serve` instead of `hypercorn app:main`."""

    def command(self) -> list[str]:
        return ["app.commands.cli", "serve", "--port", str(self.port), "--worker-class", self.worker_class]


class Workers(Server):
    """`hypercorn --workers N app:main`, or with the number in Hypercorn's file."""

    def __init__(self, workers: int, worker_class: str = "uvloop", file: Path | None = None, **settings: Any) -> None:
        super().__init__(worker_class, **settings)
        self.workers = ["--workers", str(workers)] if file is None else ["--config", str(file)]

    def command(self) -> list[str]:
        module, *arguments = super().command()
        return [module, *self.workers, *arguments]


def _write_files(directory: Path) -> None:
    """Everything that cases point to."""
    write_tiny_model(directory / "tiny")
    write_tiny_model(directory / "long-context", max_position_embeddings=131072)
    (write_tiny_model(directory / "no-tokenizer") / "tokenizer.json").unlink()
    (write_tiny_model(directory / "no-config") / "config.json").unlink()
    (write_tiny_model(directory / "broken-weights") / "model.safetensors").write_bytes(b"xx")
    write_tiny_model(directory / "mamba", architectures=["MambaForCausalLM"], model_type="mamba")
    template = write_tiny_model(directory / "template-error") / "chat_template.jinja"
    template.write_text("a\n{% if %}")
    bomb = write_tiny_model(directory / "template-bomb") / "chat_template.jinja"
    bomb.write_text("{{ 3 ** 1000000000 }}")
    (directory / "readme.gguf").write_text("hello")
    (directory / "notes.txt").write_text("hello")
    (directory / "unknown-key.toml").write_text("max_num_seq = 3\n")
    (directory / "tenants.toml").write_text("[tenants.a]\nkeys = []\n")


# name: (settings, where `{}` is the directory of files; words that the last line must have)
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "context larger than KV memory": (
        {"model": "{}/long-context", "max_model_len": 100_000, "kv_cache_memory": "1MiB"},
        ["max_model_len", "100000", "1.0 MiB holds", "max_model_len=16384 works", "kv_cache_memory="],
    ),
    "context larger than the model's": (
        {"max_model_len": 10**6},
        ["max_model_len", "1000000", "1 to 8,192", "max_model_len=8192 works"],
    ),
    "context larger than the model's, in a process": (
        {"max_model_len": 10**6, "engine": "process"},
        ["max_model_len", "1000000", "1 to 8,192", "max_model_len=8192 works"],
    ),
    "experts of a model that has none, over ranks": (
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        ["enable_expert_parallel is True", "has no experts", "enable_expert_parallel=false works"],
    ),
    "more KV memory than there is": (
        {"kv_cache_memory": "900000GiB"},
        ["kv_cache_memory", "900000.0 GiB", "are free", "works, or leave it out"],
    ),
    "too little KV memory": (
        {"kv_cache_memory": "1KiB"},
        ["HEADRACE_KV_CACHE_MEMORY", "'1KiB'", "at least 1.0MiB", "A value that works: 2GiB"],
    ),
    "a model file that is not there": (
        {"model": "{}/nothing.gguf", "load_format": "auto"},
        ["model: got", "nothing.gguf", "A model is one of", "smollm2-135m-instruct"],
    ),
    "not a model file": (
        {"model": "{}/readme.gguf", "load_format": "auto"},
        ["model: got", "readme.gguf", "b'GGUF'"],
    ),
    "some other file": (
        {"model": "{}/notes.txt", "load_format": "auto"},
        ["model: got", "notes.txt", "neither a directory nor a .gguf file", "smollm2-135m-instruct"],
    ),
    "a directory without tokenizer.json": (
        {"model": "{}/no-tokenizer"},
        ["model: got", "no-tokenizer", "tokenizer.json", "save_pretrained"],
    ),
    "a directory without config.json": (
        {"model": "{}/no-config"},
        ["model: got", "no-config", "config.json"],
    ),
    "broken weights": (
        {"model": "{}/broken-weights", "load_format": "auto"},
        ["model: got", "model.safetensors", "incomplete or damaged", "download it again"],
    ),
    "broken weights, in processes": (
        {"model": "{}/broken-weights", "load_format": "auto", "engine": "process", "data_parallel_size": 2},
        ["model: got", "model.safetensors", "incomplete or damaged", "download it again"],
    ),
    "an architecture that is not supported": (
        {"model": "{}/mamba", "model_impl": "headrace"},
        ["model: got", "MambaForCausalLM", "Supported are LlamaForCausalLM"],
    ),
    "a chat template that does not parse": (
        {"model": "{}/template-error"},
        ["model: got", "chat template does not parse", "line 2"],
    ),
    "a chat template that computes for ever": (
        {"model": "{}/template-bomb", "template_timeout": 1},
        ["model: got", "chat template cannot be compiled", "longer than 1 s"],
    ),
    "a dtype that does not exist": (
        {"dtype": "fp16"},
        ["HEADRACE_DTYPE", "'fp16'", "auto, float32, bfloat16 or float16", "A value that works: auto"],
    ),
    "quantization of what is quantized": (
        {"model": MODEL, "load_format": "auto", "quantization": "int4", "dtype": "auto"},
        ["quantization is int4", "16 or 32 bits", "Q8_0 already", "quantization=none works"],
    ),
    "quantization where torch computes": (
        {"quantization": "int8", "dtype": "float32"},
        ["quantization is int8", "dtype=auto on a CPU", "dtype is float32", "torch", "quantization=none works"],
    ),
    "quantization beside another dtype": (
        {"quantization": "int8", "dtype": "bfloat16"},
        ["quantization is int8", "dtype=auto on a CPU", "dtype is bfloat16", "quantization=none works"],
    ),
    "keys and values in 8 bits that only a card has": (
        {"kv_cache_dtype": "fp8"},
        [
            "kv_cache_dtype is fp8",
            "CUDA device of compute capability 8.9",
            "the library computes",
            "int8 a CPU",
            "auto works",
        ],
    ),
    "a quantization that does not exist": (
        {"quantization": "fp8"},
        ["HEADRACE_QUANTIZATION", "'fp8'", "none, int8 or int4", "A value that works: none"],
    ),
    "a negative number": (
        {"max_num_seqs": -1},
        ["HEADRACE_MAX_NUM_SEQS", "'-1'", "1 to 65536", "A value that works: 64"],
    ),
    "a step too small for its requests": (
        {"max_num_seqs": 600},
        ["max_num_batched_tokens (512)", "max_num_seqs (600)", "max_num_batched_tokens = 600"],
    ),
    "a variable that does not exist": (
        {"max_num_seq": 3},
        ["'HEADRACE_MAX_NUM_SEQ'", "Did you mean HEADRACE_MAX_NUM_SEQS?"],
    ),
    "a settings file with an unknown key": (
        {"config": "{}/unknown-key.toml"},
        ["unknown-key.toml", "'max_num_seq'", "Did you mean max_num_seqs?"],
    ),
    "a settings file that is not there": (
        {"config": "{}/nowhere.toml"},
        ["nowhere.toml", "No such file", "Name one that exists"],
    ),
    "a key file that is not there": (
        {"api_keys_file": "{}/nowhere.toml"},
        ["api_keys_file", "nowhere.toml", "No such file", "A file that works"],
    ),
    "a key file without keys": (
        {"api_keys_file": "{}/tenants.toml"},
        ["api_keys_file", "tenants.a", "keys", "A file that works"],
    ),
    "a directory for KV blocks that is a file": (
        {"kv_cache_dir": "{}/notes.txt"},
        ["kv_cache_dir is", "notes.txt", "cannot be used", "Name a directory that this user may create"],
    ),
    "a directory for KV blocks that cannot be made": (
        {"kv_cache_dir": "/proc/nothing/kv", "engine": "process"},
        ["kv_cache_dir is /proc/nothing/kv", "cannot be used", "Name a directory that this user may create"],
    ),
    "a size without its directory": (
        {"kv_cache_dir_size": "1GiB"},
        ["kv_cache_dir_size (1.0GiB)", "which is not set", "kv_cache_dir = /var/cache/headrace/kv"],
    ),
    "a collector that is no address": (
        {"otlp_endpoint": "collector:4318"},
        ["HEADRACE_OTLP_ENDPOINT", "'collector:4318'", "https?", "A value that works: http://127.0.0.1:4318"],
    ),
}


QUICK = (
    "context larger than KV memory",
    "context larger than the model's, in a process",
    "a model file that is not there",
    "broken weights",
    "a chat template that does not parse",
    "a dtype that does not exist",
    "a variable that does not exist",
    "a settings file with an unknown key",
)
Ended = dict[str, tuple[int, list[str]]]


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The exit status and the log lines of each case that a selected test names."""
    directory = tmp_path_factory.mktemp("misconfigured")
    _write_files(directory)
    selected = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    names = [name for name in CASES if name in selected]

    def run(kind: type[Server], name: str) -> tuple[int, list[str]]:
        settings, _ = CASES[name]
        filled: dict[str, Any] = {key: str(value).replace("{}", str(directory)) for key, value in settings.items()}
        with kind("uvloop", **tiny_settings(**{"model": directory / "tiny", **filled})) as server:
            return server.wait_exit(), server.log.strip().splitlines()

    kinds = itertools.cycle([Server, HeadraceServe])  # the second starts in half the time
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(names, pool.map(run, kinds, names), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(CASES, *QUICK))
def test_what_cannot_work_ends_with_a_line_that_says_what_would(ended: Ended, name: str) -> None:
    status, lines = ended[name]
    last = lines[-1]
    assert status != 0
    assert last.startswith("error: "), last
    missing = [word for word in CASES[name][1] if word not in last]
    assert not missing, f"{missing} is not in: {last}"
    assert not any(line.startswith("Traceback") for line in lines)


@pytest.mark.slow
def test_a_gpu_that_is_not_there_is_named_with_what_is() -> None:
    import torch

    if torch.cuda.is_available():
        device, words = "cuda:99", ["HEADRACE_DEVICE", "'cuda:99'", "auto, cpu or cuda", "A value that works: auto"]
    else:
        device, words = "cuda", ["device is cuda", "auto, cpu and cuda", "0 CUDA devices", "device=cpu works"]
    with tiny_server(device=device) as server:
        assert server.wait_exit() != 0
        last = server.log.strip().splitlines()[-1]
        assert not [word for word in words if word not in last], last


@pytest.mark.slow
@pytest.mark.parametrize("name", ["context larger than KV memory"])
def test_the_value_that_is_said_to_work_does(ended: Ended, name: str, tmp_path: Path) -> None:
    works = re.search(r"max_model_len=(\d+) works", ended[name][1][-1])
    assert works
    model = write_tiny_model(tmp_path / "long-context", max_position_embeddings=131072)
    with tiny_server(model=model, kv_cache_memory="1MiB", max_model_len=works[1]) as server:
        server.wait_ready()
        assert server.client.get("/v1/models").json()["data"][0]["max_model_len"] == int(works[1])


@pytest.mark.parametrize("kind", [Server, HeadraceServe])
def test_a_port_in_use_ends_the_server_before_it_loads_anything(kind: type[Server]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = kind(model="no/such-model")
        server.port = port
        with server:
            assert server.wait_exit() != 0
            last = server.log.strip().splitlines()[-1]
    if kind is Server:
        assert last.endswith("Address already in use")  # Hypercorn's words: it binds before it looks at the application
    else:
        assert last == (
            f"error: Port {port} on 127.0.0.1 is in use. Stop what listens there, or take another: "
            f"headrace serve --port {port + 1}"
        )


@pytest.mark.parametrize("worker_class", slow_except(["asyncio", "uvloop", "trio"], "uvloop"))
def test_more_than_one_worker_is_refused(worker_class: str, tmp_path: Path) -> None:
    file = None
    if worker_class == "asyncio":
        file = tmp_path / "hypercorn.toml"
        file.write_text("workers = 3\n")
    number = 3 if file else 2
    with Workers(number, worker_class, file) as server:
        assert server.wait_exit() != 0
        last = server.log.strip().splitlines()[-1]
    for words in ("error: workers", f"got {number}", "hypercorn --workers 1 app:main", "data_parallel_size"):
        assert words in last
    assert server.log.count("workers: got") == 1, server.log
    assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("workers", "worker_class"), slow_except([(0, "trio"), (0, "uvloop"), (1, "asyncio")], (0, "trio"))
)
def test_one_worker_and_none_serve(workers: int, worker_class: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    with Workers(workers, worker_class, model=model, load_format="dummy") as server:
        server.poll(lambda: server.get_or_none("/livez"), lambda found: found is not None and found.status_code == 200)


@pytest.mark.slow
def test_from_the_first_answer_on_the_server_says_how_far_it_is() -> None:
    """This is `headrace serve`; tests/app/serving/test_start.py has `hypercorn app:main`."""
    with HeadraceServe(max_model_len=1024) as server:
        seen: list[tuple[int, dict[str, Any]]] = []
        while not seen or seen[-1][0] != 200:
            answer = server.poll(lambda: server.get_or_none("/startupz"), lambda found: found is not None)
            assert answer is not None
            seen.append((answer.status_code, answer.json()))
        starting = [body for status, body in seen if status == 503]
        assert starting, "the port answers while the model is still loading"
        assert all(body["phase"] == "starting" and body["task"] for body in starting)
        assert len({body["task"] for body in starting}) > 1, "what is being done changes"
        assert seen[-1][1]["phase"] == "ready"
        elapsed = [body["elapsed_seconds"] for _, body in seen]
        assert elapsed == sorted(elapsed)
        assert server.stop() == 0


@pytest.mark.slow
def test_a_kv_cache_below_the_models_context_is_pointed_out(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "long-context", max_position_embeddings=131072)
    with tiny_server(model=model, kv_cache_memory="1MiB", max_model_len="") as server:
        server.wait_ready()
        said = "Prompt and answer may have 16384 tokens, and not the model's 131072. More: a larger kv_cache_memory"
        assert said in server.log


def test_every_lack_of_memory_is_said_to_be_one() -> None:
    import torch

    kinds = (MemoryError(), OSError(errno.ENOMEM, ""), torch.OutOfMemoryError("CUDA"))
    host = RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory")
    assert all(map(_is_lack_of_memory, (*kinds, host)))
    assert not any(map(_is_lack_of_memory, (None, OSError(errno.ENOENT, ""), RuntimeError("other"))))


@pytest.mark.slow
def test_a_limit_of_address_space_ends_the_server_in_one_line() -> None:
    """With `ulimit -v`, the weights or the KV cache do not fit, and the operator sees no traceback."""
    with HeadraceServe("uvloop", kv_cache_memory="4GiB") as server:
        process = server._process
        assert process is not None
        resource.prlimit(process.pid, resource.RLIMIT_AS, (2 * 2**30, 2 * 2**30))
        assert server.wait_exit() == 1
        assert "Traceback" not in server.log
        last = server.log.splitlines()[-1]
        assert last.startswith(
            "error: There is not enough memory to load the model. What works: a smaller kv_cache_memory"
        )
        assert "this process may have 2.0 GiB (ulimit -v)" in last
