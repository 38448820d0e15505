"""The embedded model twice, in float32 on the CPU: loaded by this project, and as `transformers` reads it.

Two times half a gigabyte, kept while tests of this package run: for that scope the folder has an `__init__.py`.
"""

from collections.abc import Iterator

import pytest

from engine.frontend.llm import LLM
from tests.golden.driving import float32_llm
from tests.golden.oracle import Oracle
from tests.support.embedded_model import embedded_gguf


@pytest.fixture(scope="package")
def smollm2() -> Iterator[LLM]:
    with float32_llm(embedded_gguf(), 512) as llm:
        yield llm


@pytest.fixture(scope="package")
def smollm2_oracle() -> Oracle:
    return Oracle.from_gguf(embedded_gguf())
