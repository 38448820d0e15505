"""How well a model reads a short text, told where weights were quantized at load: so a model that this spoils shows.

The worker asks when the model has its cache, before anybody else does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from gpu.checkpoint import ModelConfig
from gpu.checkpoint.tensors import tensor_shapes
from gpu.model_runner import MAX_LOGITS_ROWS
from gpu.runner import LanguageModel, ModelInputs
from gpu.sampling import token_logprobs

_TEXT = """\
A server of language models has many clients at once, and each of them waits for its own answer. Some have asked for \
a word, some for a page, and some have left without saying so. The server reads all prompts, and then it makes one \
token for everybody in every step, over and over, until the last answer is complete. What it has computed of a prompt \
stays in memory, in blocks of sixteen tokens, because every later token looks back at all earlier ones. When the \
blocks run out, somebody has to give way and will be computed again.

So there are three questions. Who comes next? Whoever has been served least. Who gives way? Whoever came last. And \
when is a request over? When its answer is complete, when its time is up, or when its client is gone, whichever is \
first. Then everything that it had is given back: its place in the queue, its blocks and its row in the batch. If one \
of the three is answered badly, the machine may be fast and people will still find it slow.
"""
_MOST_PRODUCTS = 30 * 10**9  # a second of one thread without much help from its processor
_FEWEST_TOKENS = 32  # of a model so large that these take longer


class Perplexity(NamedTuple):
    """`value` of `num_tokens` tokens, each predicted from all before it."""

    value: float
    num_tokens: int

    def __str__(self) -> str:
        return f"perplexity {self.value:.2f} over {self.num_tokens} tokens of a built-in text"


def sample_text(tokenizer: Tokenizer, config: ModelConfig) -> list[int]:
    """Tokens of the text, some two hundred, or fewer for a large model."""
    num_weights = sum(map(math.prod, tensor_shapes(config).values()))
    known = [token for token in tokenizer.encode(_TEXT).ids if token < config.vocab_size]
    return known[: max(_FEWEST_TOKENS, _MOST_PRODUCTS // num_weights)]


def perplexity(model: LanguageModel, token_ids: Sequence[int], block_size: int, num_groups: int = 1) -> Perplexity:
    """Of all tokens but the first, in one pass. It overwrites the first blocks of the model's cache."""
    count = len(token_ids)
    inputs = ModelInputs(
        input_ids=np.array(token_ids, dtype=np.int64),
        positions=np.arange(count),
        query_start_loc=np.array([0, count], dtype=np.int32),
        seq_lens=np.array([count], dtype=np.int32),
        block_tables=np.arange(num_groups * -(-count // block_size), dtype=np.int32).reshape(num_groups, 1, -1),
        num_decodes=int(count == 1),
        num_prompt_tokens=np.array([count], dtype=np.int32),
    )
    hidden, total = model.forward(inputs)[:-1], 0.0
    for start in range(0, len(hidden), MAX_LOGITS_ROWS):
        rows = hidden[start : start + MAX_LOGITS_ROWS]
        targets = inputs.input_ids[start + 1 : start + 1 + len(rows)]
        entries = token_logprobs(model.compute_logits(rows), targets, np.zeros_like(targets))
        total += math.fsum(entry.logprob for entry in entries)
    mean = -total / max(1, len(hidden))
    return Perplexity(math.exp(mean) if mean < 700 else math.inf, len(hidden))
