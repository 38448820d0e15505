"""Importing the application is cheap: the server answers before torch and the readers of models are loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("module", ["app", "app.application", "app.cli", "app.engine_process"])
def test_import_brings_neither_torch_nor_gguf(module: str) -> None:
    code = f"import sys, {module}; print(sorted(sys.modules.keys() & {{'torch', 'transformers', 'gguf'}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
