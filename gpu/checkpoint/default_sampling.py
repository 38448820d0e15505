"""What a model's authors recommend to sample with, for requests that leave it open.

The names are those that vLLM takes of generation_config.json, and those that llama.cpp's converter gives them in GGUF's
metadata. A value that no request could ask for is passed over with a warning: it harms only who relies on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from engine.messages import LOW_END_EXCLUDED, RANGES
from gpu.checkpoint.errors import ModelError
from gpu.checkpoint.header_fields import HeaderField, check_field

logger = logging.getLogger(__name__)

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
SAMPLING_FIELDS = (*_NAMES, "max_tokens")
HF_KEYS = {name: name for name in _NAMES} | {"max_new_tokens": "max_tokens"}
GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}

Sampling = Mapping[str, float]
"""By the names of `SamplingParams`, in their ranges; what is left open is not there."""


def default_sampling(find: Callable[[str], Any], keys: Mapping[str, str], source: str) -> Sampling:
    """What `find` gives for the keys of a file, `source`, by the names of `SamplingParams`."""
    sampling: dict[str, float] = {}
    for key, name in keys.items():
        value = find(key)
        if value is None:
            continue
        if name == "top_k" and value == -1:
            value = 0  # both mean all tokens
        low, high = RANGES[name]
        low = 1e-6 if name in LOW_END_EXCLUDED else max(low, 1) if name == "max_tokens" else low
        try:
            number = check_field(HeaderField(type(low), low, high, ""), value, key=key, source=source)
        except ModelError as error:
            logger.warning("%s This recommendation for sampling is ignored.", error)
        else:
            # GGUF keeps 32 bits: 0.95 would be told as 0.949999988079071.
            sampling[name] = number if isinstance(number, int) else float(f"{number:.7g}")
    return sampling
