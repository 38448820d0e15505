"""Loads model files that nobody should trust, each in a process of its own that may take little memory and time.

One process imports everything and then forks for each file, so that a load costs milliseconds. It goes the server's
way: settings, `open_files`, prompt encoder, grammar compiler, engine core, and one greedy token.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MEMORY = 2**30  # bytes beyond what the imports have mapped
SECONDS = 10
NOTHING_SAID = "nothing"


@dataclass(frozen=True)
class Outcome:
    kind: str  # "token", the name of an exception's class, or NOTHING_SAID by a process that was killed
    message: str
    is_ours: bool = False  # whether it is an error that says what the operator can do

    @property
    def is_allowed(self) -> bool:
        return self.kind == "token" or self.is_ours


class Loader:
    """A context manager; `load` is its only use."""

    def __enter__(self) -> Loader:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.foreign_files"],
            cwd=ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "RUST_BACKTRACE": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def load(self, path: Path, *, load_format: str = "auto", only_open: bool = False) -> Outcome:
        """What becomes of the model at `path`; with `only_open` without its weights being drawn."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(path), load_format, only_open]) + "\n")
        self._process.stdin.flush()
        return Outcome(**json.loads(self._process.stdout.readline()))


def _serve() -> None:
    import gpu.executor  # noqa: F401
    from app.serving.loading import open_files  # noqa: F401
    from app.serving.prompts import PromptEncoder  # noqa: F401

    for line in sys.stdin:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _load_and_tell(writing, *json.loads(line))
        os.close(writing)
        with open(reading, "rb") as pipe:
            said = pipe.read().decode()
        _, status = os.waitpid(pid, 0)
        outcome = json.loads(said) if said else {"kind": NOTHING_SAID, "message": f"status {status}"}
        print(json.dumps(outcome), flush=True)


def _load_and_tell(writing: int, path: str, load_format: str, only_open: bool) -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS,) * 2)  # seconds of work, however busy the machine is
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(6 * SECONDS)  # for a load that waits
    try:
        outcome = _load(path, load_format, only_open)
    except BaseException as error:
        from app.config.settings import SettingsError
        from engine.errors import ConfigError
        from gpu.checkpoint import ModelError
        from protocol.chat_template import ChatTemplateError

        is_ours = isinstance(error, (ModelError, ConfigError, SettingsError, ChatTemplateError))
        outcome = {"kind": type(error).__name__, "message": str(error)[:2000], "is_ours": is_ours}
    os.write(writing, json.dumps(outcome).encode())
    os._exit(0)


def _load(path: str, load_format: str, only_open: bool) -> dict[str, object]:
    from app.config.settings import Settings
    from app.serving.loading import core_factory, make_grammar_compiler, open_files
    from app.serving.prompts import PromptEncoder
    from engine.frontend.llm import LLM
    from engine.messages import SamplingParams

    settings = Settings(
        model=path, load_format=load_format, device="cpu", kv_cache_memory="2MiB", max_num_seqs=2, num_threads=1
    )
    files = open_files(settings, None)
    PromptEncoder(files)
    if only_open:
        return {"kind": "opened", "message": ""}
    grammars = make_grammar_compiler(files)
    grammars.build_tokenizer()
    llm = LLM(core_factory(settings, files, grammars=grammars)(), files.tokenizer)
    (generation,) = llm.generate([[0]], SamplingParams(max_tokens=1, temperature=0.0))
    return {"kind": "token", "message": str(generation.choices[0].token_ids), "is_ours": True}


if __name__ == "__main__":
    _serve()
