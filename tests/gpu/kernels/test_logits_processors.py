"""Bias, grammar masks and penalties, against the CPU sampler's own."""

import numpy as np
import torch

from gpu.kernels import add_bias, apply_bitmask, apply_penalties
from gpu.sampling.logits import Penalties, SeenTokens
from gpu.sampling.logits import apply_penalties as apply_penalties_by_list

MINUS_INF = float("-inf")


def test_bias_is_added_also_twice_to_one_token_and_padding_does_nothing():
    logits = torch.randn(3, 50)
    wanted = logits.clone()
    wanted[0, 3] += 1.5
    wanted[2, 49] += 2.0 - 5.0
    wanted[2, 0] = MINUS_INF
    add_bias(
        logits,
        torch.tensor([0, 2, 2, -1, 2, 2]),
        torch.tensor([3, 49, 49, 7, 0, 0]),
        torch.tensor([1.5, 2.0, -5.0, 9.0, MINUS_INF, 1.0]),
    )
    torch.testing.assert_close(logits, wanted)


def test_a_grammar_forbids_the_tokens_whose_bits_are_zero():
    torch.manual_seed(0)
    vocab_size = 1100  # not a multiple of 32
    allowed = torch.rand(2, 1120) < 0.5
    words = (allowed.unflatten(1, (-1, 32)).long() << torch.arange(32)).sum(-1)
    bitmask = torch.where(words >= 2**31, words - 2**32, words).int()
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(3, vocab_size).to(dtype)
        before = logits.clone()
        apply_bitmask(logits, bitmask, torch.tensor([1, -1, 0]))
        assert torch.equal(logits[1], before[1])
        for row, mask in ((0, allowed[1]), (2, allowed[0])):
            assert torch.equal(logits[row], before[row].masked_fill(~mask[:vocab_size], MINUS_INF))


def test_penalties_are_those_of_the_cpu_and_leave_the_scratch_clean():
    torch.manual_seed(0)
    vocab_size, max_len = 300, 3000
    token_ids = torch.randint(0, 60, (4, max_len), dtype=torch.int32)  # many repeats, within and across chunks
    num_prompt, num_tokens = torch.tensor([5, 0, 2600, 7]), torch.tensor([2500, 1, 2900, 7])
    columns = {
        "repetition_penalty": torch.tensor([1.3, 1.0, 0.7, 1.1]),
        "presence_penalty": torch.tensor([0.0, 1.5, -0.5, 0.3]),
        "frequency_penalty": torch.tensor([0.02, 0.0, 0.1, -0.2]),
        "num_prompt_tokens": num_prompt.int(),
        "num_tokens": num_tokens.int(),
    }
    scratch = torch.zeros(5, vocab_size, dtype=torch.int32)
    places = [3, -1, 0, 2, 1]
    logits = torch.randn(len(places), vocab_size)
    wanted = logits.clone()
    for row, place in enumerate(places):
        if place < 0:
            continue
        seen = SeenTokens(token_ids[place, : num_tokens[place]].numpy(), int(num_prompt[place]))

        def everywhere(column: torch.Tensor, count: int = len(seen.token_ids), place: int = place) -> np.ndarray:
            return np.full(count, column[place].item(), dtype=np.float32)

        apply_penalties_by_list(
            wanted.numpy(),
            Penalties(
                rows=np.full(len(seen.token_ids), row),
                token_ids=seen.token_ids,
                output_counts=seen.output_counts.astype(np.float32),
                repetition=everywhere(columns["repetition_penalty"]),
                presence=everywhere(columns["presence_penalty"]),
                frequency=everywhere(columns["frequency_penalty"]),
            ),
        )
    apply_penalties(logits, columns, token_ids, torch.tensor(places), scratch=scratch)
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)
    assert not scratch.any()
