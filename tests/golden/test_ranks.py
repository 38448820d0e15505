"""The embedded model, greedy, in several processes: token for token what it says in one, however it is cut."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from app.library import LLM
from engine.messages import SamplingParams
from tests.golden.prompts import PROMPTS
from tests.integration.chaos.test_drain import children

pytestmark = pytest.mark.slow


def say(prompts: list[str], num_tokens: int, **settings: Any) -> list[list[int]]:
    llm = LLM(progress=False, device="cpu", max_model_len=512, max_num_seqs=32, num_threads=2, **settings)
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    said = [each.choices[0].token_ids for each in llm.generate(prompts, sampling, progress=False)]
    assert len(ranks()) == settings.get("tensor_parallel_size", 0) * settings.get("pipeline_parallel_size", 0)
    del llm
    assert not ranks(), "what computes for a model goes with it"
    return said


def ranks() -> list[int]:
    return [pid for pid in children(os.getpid()) if b"rank_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_two_stages_of_two_uneven_ranks_say_what_one_process_says(dtype: str) -> None:
    """By the library, and by torch."""
    whole = say(PROMPTS[:8], 6, dtype=dtype)
    assert say(PROMPTS[:8], 6, dtype=dtype, tensor_parallel_size=2, pipeline_parallel_size=2) == whole
