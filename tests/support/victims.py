"""Requests that are made to be abandoned: they never end by themselves, so what ends early was aborted."""

from __future__ import annotations

import random
from typing import Any

PATH = "/v1/completions"
SHORT = 20  # tokens of a prompt that is computed in one step
LONG = 20_000  # tokens: hundreds of steps of the narrow server


def endless(num_prompt_tokens: int = SHORT, *, stream: bool, n: int = 1) -> dict[str, Any]:
    """A greedy completion of thousands of tokens, after token ids that no other request begins with."""
    prompt = [random.randrange(1000, 40000) for _ in range(num_prompt_tokens)]
    return {"prompt": prompt, "max_tokens": 8000, "ignore_eos": True, "temperature": 0, "n": n, "stream": stream}
