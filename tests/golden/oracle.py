"""`transformers` as the judge of a whole engine: what it says, with which logits, and how close a call it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.messages import TokenLogprobs
from tests.support.embedded_model import read_gguf_once

TOLERANCE = 1e-4  # of log-probabilities, which are of the order of 1 to 10


@dataclass(frozen=True)
class Oracle:
    """A model of `transformers` in float32."""

    model: PreTrainedModel

    @classmethod
    def from_gguf(cls, path: Path) -> Oracle:
        """A model as transformers' own GGUF reader sees it: nothing of gpu.checkpoint is used.

        Its public door, `from_pretrained(..., gguf_file=...)`, does the same and asks for the accelerate package.
        """
        with read_gguf_once(), no_init_weights():
            read = load_gguf_checkpoint(str(path))["config"]
            config = AutoConfig.for_model(**read)
            model = AutoModelForCausalLM.from_config(config).eval()
            tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
        missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
        assert (missing, unexpected) == (["lm_head.weight"], [])
        model.tie_weights()
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        return cls(model)

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[list[int]], max_tokens: int, *, eos: int | None = None, min_tokens: int = 0
    ) -> list[list[int]]:
        """`generate()`, greedy, all prompts in one padded batch. Without `eos` no token ends it. EOS is part of what
        is returned, as in the engine."""
        width = max(map(len, prompts))
        rows = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        self.model.generation_config.eos_token_id = eos
        generate: Any = self.model.generate  # from a mixin that the class itself does not have
        output = generate(
            rows,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=min_tokens or None,
            pad_token_id=0,
        )
        return [_up_to(eos, row[width:]) for row in output.tolist()]

    @torch.inference_mode()
    def logprobs(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        """[len(output), vocab]: row i is the distribution that output token i was drawn from. One pass, no cache."""
        tokens = torch.tensor([[*prompt, *output]])
        logits = self.model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1)

    def assert_says(self, prompt: list[int], actual: list[int], expected: list[int]) -> None:
        """Fail unless both are the same, and tell how close the call was where they part."""
        if actual == expected:
            return
        pairs = zip(actual, expected, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(actual), len(expected)))
        if at in (len(actual), len(expected)):
            raise AssertionError(f"{len(actual)} tokens, but {len(expected)} expected; they agree up to there")
        row = self.logprobs(prompt, expected)[at]
        gap = float(row[expected[at]] - row[actual[at]])
        raise AssertionError(
            f"output token {at} is {actual[at]}, not {expected[at]}, which transformers prefers by {gap:.2e} nats"
        )

    def assert_agrees(
        self, prompt: list[int], output: list[int], logprobs: list[TokenLogprobs], *, greedy: bool
    ) -> None:
        """Every generated position: the token's log-probability and rank, the most likely tokens, and, where the
        request was greedy, that the token is the most likely one."""
        assert [entry.token_id for entry in logprobs] == output
        for position, (entry, row) in enumerate(zip(logprobs, self.logprobs(prompt, output), strict=True)):
            where = f"output token {position}"
            top = row.topk(len(entry.top)).values.tolist()
            named = [row[token_id].item() for token_id, _ in entry.top]
            reported = [logprob for _, logprob in entry.top]
            # Compared by value, so that two tokens that tie within the tolerance may change places.
            assert reported == _about(top), where
            assert reported == _about(named), where
            own = row[entry.token_id].item()
            assert entry.logprob == _about(own), where
            assert (row > own + TOLERANCE).sum() < entry.rank <= (row >= own - TOLERANCE).sum(), where
            if greedy:
                assert entry.token_id == row.argmax(), where


def _about(values: float | list[float]) -> object:
    return pytest.approx(values, abs=TOLERANCE, rel=0)


def _up_to(eos: int | None, tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens
