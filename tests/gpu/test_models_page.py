"""The tables of docs/models.md are those of the records."""

from __future__ import annotations

import runpy
from pathlib import Path

from tests.gpu.native_builds import needs_library

DOCS = Path(__file__).parents[2] / "docs"


@needs_library
def test_the_page_about_models_has_them_as_they_are() -> None:
    page = (DOCS / "models.md").read_text()
    assert runpy.run_path(str(DOCS / "models_tables.py"))["written"](page) == page, "python docs/models_tables.py"
    assert "| LlamaForCausalLM |" in page
    assert "| `hermes` | Qwen 2.5" in page
