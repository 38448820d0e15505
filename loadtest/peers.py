"""The commands that start the compared servers. Each peer has its own environment: see README.md."""

from __future__ import annotations

import os
from pathlib import Path

from gpu.checkpoint import EMBEDDED_MODEL, default_cache_dir, open_model
from gpu.checkpoint.embedded import fetch_embedded_model
from gpu.host import processor_flags
from loadtest.export_model import export_model
from loadtest.servers import Server, headrace

CONTEXT = 512  # tokens per stream, prompt and output
VLLM_TIMEOUT = 300.0  # seconds; its first start compiles

HEADRACE, VLLM, LLAMA = "headrace", "vllm", "llama.cpp"


def make_server(name: str, *, vllm: Path | None, llama: Path | None, max_streams: int, scratch: Path) -> Server:
    """One of HEADRACE, VLLM and LLAMA with the embedded model, not yet started.

    `vllm` is the environment it is installed in, `llama` the server's executable. Both peers get room for `max_streams`
    and are otherwise at their defaults; Headrace is entirely. What vLLM reads is written to `scratch`.
    """
    if name == HEADRACE:
        return headrace(HEADRACE)
    if name == VLLM and vllm is not None:
        directory = export_model(open_model(EMBEDDED_MODEL), scratch / EMBEDDED_MODEL)
        return _vllm(vllm, directory, max_streams)
    if name == LLAMA and llama is not None:
        return _llama(llama, fetch_embedded_model(default_cache_dir()), max_streams)
    raise SystemExit(f"where {name} is installed has to be said: --vllm ENVIRONMENT, --llama EXECUTABLE")


def _vllm(environment: Path, directory: Path, max_streams: int) -> Server:
    command = [str(environment / "bin" / "vllm"), "serve", str(directory), "--served-model-name", EMBEDDED_MODEL]
    command += ["--host", "127.0.0.1", "--port", "{port}", "--dtype", "bfloat16"]
    command += ["--max-model-len", "2048", "--max-num-seqs", str(max_streams)]
    variables = {
        "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",  # it looks for the compiler's helpers there
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Server(
        VLLM, command, model=EMBEDDED_MODEL, ready_path="/health", environment=variables, timeout=VLLM_TIMEOUT
    )


def _llama(executable: Path, gguf: Path, max_streams: int) -> Server:
    command = [str(executable), "--model", str(gguf), "--alias", EMBEDDED_MODEL, "--host", "127.0.0.1"]
    command += ["--port", "{port}", "--parallel", str(max_streams), "--ctx-size", str(CONTEXT * max_streams)]
    # Prompts that never come again would be kept in memory and never found: that costs time and gives nothing.
    command += ["--cache-ram", "0"]
    if "amx_int8" in processor_flags():
        command += ["--no-repack"]  # its repacked weights end it with SIGILL there: a thread without tiles configured
    libraries = os.pathsep.join(filter(None, (str(executable.parent), os.environ.get("LD_LIBRARY_PATH"))))
    variables = {"LD_LIBRARY_PATH": libraries}
    return Server(LLAMA, command, model=EMBEDDED_MODEL, ready_path="/health", environment=variables)
