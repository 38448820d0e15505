"""The embedded model, greedy, in several processes: token for token what it says in one, however it is cut."""

from __future__ import annotations

from typing import Any

import pytest

from app.offline import LLM
from engine.messages import SamplingParams
from tests.golden.prompts import PROMPTS

pytestmark = pytest.mark.slow


def say(prompts: list[str], num_tokens: int, **settings: Any) -> list[list[int]]:
    llm = LLM(progress=False, device="cpu", max_model_len=512, max_num_seqs=32, num_threads=2, **settings)
    try:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        return [each.choices[0].token_ids for each in llm.generate(prompts, sampling, progress=False)]
    finally:
        llm.core.shutdown()


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_two_stages_of_two_uneven_ranks_say_what_one_process_says(dtype: str) -> None:
    """By the library, and by torch."""
    whole = say(PROMPTS[:8], 6, dtype=dtype)
    assert say(PROMPTS[:8], 6, dtype=dtype, tensor_parallel_size=2, pipeline_parallel_size=2) == whole
