"""The embedded model twice, in float32 on the CPU: loaded by this project, and as `transformers` reads it.

Two times half a gigabyte, kept while tests of this package run: for that scope the folder has an `__init__.py`.
"""

import gc
from collections.abc import Iterator

import pytest
import torch

from app.offline import LLM
from tests.embedded_model import embedded_gguf
from tests.golden.oracle import Oracle


@pytest.fixture(scope="module", autouse=True)
def _models_go_with_their_file() -> Iterator[None]:
    """Models are parts of cycles, and the collector would leave gigabytes of them lying for the rest of the run."""
    yield
    gc.collect()


@pytest.fixture(scope="package")
def smollm2() -> Iterator[LLM]:
    threads = torch.get_num_threads()
    llm = LLM(
        str(embedded_gguf()),
        progress=False,
        dtype="float32",
        device="cpu",
        max_model_len=512,
        max_num_seqs=20,
        num_threads=1,  # as two files run at a time, two threads of torch would wait for each other
        target_inter_token_latency=60.0,  # so that no plan depends on the clock
    )
    yield llm
    llm.core.shutdown()
    torch.set_num_threads(threads)


@pytest.fixture(scope="package")
def smollm2_oracle() -> Oracle:
    return Oracle.from_gguf(embedded_gguf())
