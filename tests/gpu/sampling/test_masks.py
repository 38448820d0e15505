"""Token masks: nothing but what is allowed is sampled, and rows without a mask do not notice."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.messages import StructuredOutput, StructuredOutputKind
from engine.plan import TokenMasks
from gpu.sampling.logits import LogitsMask, apply_mask, logits_mask
from tests.gpu.sampling_helpers import metadata_of, new_request, sample

VOCAB = 1003  # no multiple of a word's bits


def logits_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1)) * 3


def bits_of(*allowed: list[int], words: int = -(-VOCAB // 32)) -> np.ndarray:
    bits = np.zeros((len(allowed), words), dtype=np.uint32)
    for row, token_ids in zip(bits, allowed, strict=True):
        for token_id in token_ids:
            row[token_id // 32] |= np.uint32(1 << token_id % 32)
    return bits


@pytest.mark.parametrize("rows", [[0, 1, 2], [1], [2, 0]])
def test_logits_of_allowed_tokens_stay_and_all_others_are_minus_infinity(rows: list[int]) -> None:
    allowed = [[0, 31, 32, VOCAB - 1], [5], list(range(VOCAB))][: len(rows)]
    before = logits_of(3)
    after = before.clone()
    apply_mask(after.numpy(), LogitsMask(rows=np.array(rows), bits=bits_of(*allowed)))
    expected = torch.full_like(before, -torch.inf)
    for row in range(3):
        kept = allowed[rows.index(row)] if row in rows else list(range(VOCAB))
        expected[row, kept] = before[row, kept]
    assert torch.equal(after, expected)


def test_tokens_beyond_the_mask_are_not_allowed() -> None:
    logits = logits_of(1)
    apply_mask(logits.numpy(), LogitsMask(rows=np.array([0]), bits=bits_of([7], words=2)))
    assert logits.isfinite().nonzero().tolist() == [[0, 7]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_with_a_mask_and_without_one_are_sampled_side_by_side(temperature: float) -> None:
    requests = [new_request(str(seed), temperature=temperature, seed=seed) for seed in range(6)]
    metadata = metadata_of(requests)
    plain = sample(logits_of(6), metadata).token_ids
    allowed = [[3, 900], [17]]
    mask = LogitsMask(rows=np.array([1, 4]), bits=bits_of(*allowed))
    masked = sample(logits_of(6), replace(metadata, mask=mask))
    assert masked.token_ids[1] in allowed[0]
    assert masked.token_ids[4] == 17
    assert masked.finite.all()
    assert masked.token_ids[[0, 2, 3, 5]].tolist() == plain[[0, 2, 3, 5]].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_token_comes_before_min_tokens_where_nothing_else_may(temperature: float) -> None:
    request = new_request(temperature=temperature, min_tokens=9, stop_token_ids=(17, 18), repetition_penalty=1e-3)
    for allowed, possible in (([17], [17]), ([17, 18], [17, 18]), ([17, 500], [500])):
        mask = LogitsMask(rows=np.array([0]), bits=bits_of(allowed))
        sampled = sample(logits_of(1), replace(metadata_of([request]), mask=mask))
        assert sampled.finite.all()
        assert sampled.token_ids[0] in possible


def test_logprobs_are_those_of_what_a_grammar_allows_and_else_of_the_model() -> None:
    """`allowed_token_ids` and `bad_words` make masks as grammars do, and change nothing of what the model thinks."""
    grammar = StructuredOutput(kind=StructuredOutputKind.CHOICE, value='["a"]')
    requests = [
        new_request("grammar", temperature=0.0, logprobs=2, structured_output=grammar),
        new_request("allowed", temperature=0.0, logprobs=2, allowed_token_ids=(3, 900)),
        new_request("silent", temperature=0.0, allowed_token_ids=(3, 900)),
    ]
    logits = logits_of(1).repeat(3, 1)
    whole = logits[0].log_softmax(0)
    allowed = logits[0, [3, 900]].log_softmax(0)
    mask = LogitsMask(rows=np.arange(3), bits=bits_of(*[[3, 900]] * 3))
    sampled = sample(logits, replace(metadata_of(requests), mask=mask))
    assert set(sampled.token_ids) == {3 if allowed[0] > allowed[1] else 900}
    of_grammar, of_model = sampled.logprobs[0], sampled.logprobs[1]
    top = dict(of_grammar.top)
    assert [top[3], top[900]] == pytest.approx(allowed.tolist(), abs=1e-5)
    assert of_grammar.rank == 1
    assert of_model.logprob == pytest.approx(float(whole[of_model.token_id]), abs=1e-5)
    assert of_model.rank == 1 + int((whole > whole[of_model.token_id]).sum())
    assert [token_id for token_id, _ in of_model.top] == whole.topk(2).indices.tolist()


def test_a_row_that_may_say_nothing_is_not_sound() -> None:
    metadata = metadata_of([new_request(temperature=0.0)] * 2)
    sampled = sample(logits_of(2), replace(metadata, mask=LogitsMask(rows=np.array([1]), bits=bits_of([]))))
    assert sampled.finite.tolist() == [True, False]


def test_masks_find_the_rows_of_their_requests() -> None:
    masks = TokenMasks(indices=np.array([1, 4, 6]), bits=bits_of([1], [4], [6]))
    found = logits_mask(masks, np.array([6, 0, 1]))  # in the device's order; request 4 does not sample
    assert found is not None
    assert found.rows.tolist() == [0, 2]
    assert np.array_equal(found.bits, bits_of([6], [1]))
    assert logits_mask(masks, np.array([0, 2])) is None
