"""Importing the application is cheap: the server answers before it loads what the model needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.seconds


def imported(code: str, names: set[str]) -> set[str]:
    code = f"import sys; {code}; print(*sys.modules.keys() & {names})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["app", "app.application", "app.commands.cli", "app.serving.engine_main"])
def test_import_brings_neither_torch_nor_gguf(module: str) -> None:
    assert not imported(f"import {module}", {"torch", "transformers", "gguf"})


def test_what_answers_first_brings_nothing_that_only_the_model_needs() -> None:
    names = {"numpy", "tokenizers", "llguidance", "zmq", "jinja2", "rich", "engine.core.core", "gpu.checkpoint"}
    assert not imported("import app.commands.cli, app.serving.process, app.application", names)


def test_the_command_brings_no_protocol_that_it_does_not_speak() -> None:
    code = "from app.__main__ import prepare_process; prepare_process(); import app.application, hypercorn.asyncio"
    assert not imported(code, {"h2.connection", "hpack", "priority", "wsproto"})
    assert imported("import hypercorn.asyncio, app; app.prepare_process()", {"h2.connection", "wsproto"})


@pytest.mark.slow
def test_an_engine_in_a_thread_brings_no_zmq() -> None:
    assert not imported("import app.serving.loading", {"zmq"})
