"""The tokens that min-p, top-k and top-p leave are those of a brute-force reference, on every path."""

from typing import Any

import numpy as np
import pytest
import torch

from gpu.sampling import draw
from gpu.sampling.draw import cutoffs
from tests.gpu.sampling_helpers import metadata_of, new_request, sample

CASES = [
    (top_k, top_p, min_p)
    for top_k in (0, 1, 5, 40, 900, 5000)
    for top_p in (1.0, 0.999, 0.9, 0.3, 1e-6)
    for min_p in (0.0, 0.02, 0.5, 1.0)
]


def kept_by_brute_force(probs: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """min-p, then top-k, then top-p over the renormalized rest; ties with the last one stay."""
    p = probs.double().tolist()
    kept = [i for i in range(len(p)) if p[i] >= min_p * max(p)]
    if 0 < top_k < len(kept):
        level = sorted((p[i] for i in kept), reverse=True)[top_k - 1]
        kept = [i for i in kept if p[i] >= level]
    if top_p < 1.0:
        total, mass = sum(p[i] for i in kept), 0.0
        for i in sorted(kept, key=lambda i: -p[i]):
            mass += p[i]
            if mass >= top_p * total:
                break
        kept = [j for j in kept if p[j] >= p[i]]
    return set(kept)


def columns(cases: list[tuple[int, float, float]]) -> list[np.ndarray]:
    return [
        np.array(column, dtype) for column, dtype in zip(zip(*cases, strict=True), (int, float, float), strict=True)
    ]


def most_likely(probs: torch.Tensor, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The `width` most probable tokens of each row, and the least probable of them."""
    values = probs.topk(width).values.numpy()
    return values, values[:, -1].astype(np.float64)


def distribution(kind: str, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, 1003, generator=generator)
    scale = {"flat": 0.3, "usual": 2.0, "peaked": 9.0, "tied": 2.0}[kind]
    logits = (logits * scale).round() if kind == "tied" else logits * scale
    return logits.softmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flat", "usual", "peaked", "tied"])
def test_kept_tokens_are_those_of_the_reference(kind: str):
    probs = distribution(kind, len(CASES))
    expected = [kept_by_brute_force(row, *case) for row, case in zip(probs, CASES, strict=True)]
    level, is_known = cutoffs(probs.numpy(), *columns(CASES))
    assert is_known.all()
    for row, case in enumerate(CASES):
        kept = set(np.flatnonzero(probs[row].numpy() >= level[row]).tolist())
        assert kept == expected[row], f"top_k, top_p, min_p = {case}"


@pytest.mark.parametrize("kind", ["flat", "usual", "peaked", "tied"])
def test_a_cutoff_that_few_candidates_know_is_that_of_the_vocabulary(kind: str):
    probs = distribution(kind, len(CASES))
    exact, _ = cutoffs(probs.numpy(), *columns(CASES))
    for width in (4, 64, 512, 1000):
        values, unseen = most_likely(probs, width)
        level, is_known = cutoffs(values, *columns(CASES), unseen=unseen)
        assert is_known.any()
        assert np.array_equal(level[is_known], exact[is_known])
    # Candidates of several ranks: some that are left out are more likely than some that are not.
    parts = [most_likely(part, 64) for part in probs.split(400, dim=1)]
    level, is_known = cutoffs(
        np.concatenate([values for values, _ in parts], axis=1),
        *columns(CASES),
        unseen=np.max([unseen for _, unseen in parts], 0),
    )
    assert is_known.any()
    assert np.array_equal(level[is_known], exact[is_known])


def test_rows_whose_cut_lies_outside_the_candidates_fall_back_to_a_full_sort(monkeypatch: pytest.MonkeyPatch):
    sizes = []

    def spy(probs: np.ndarray, *args: Any, **keywords: Any) -> tuple[np.ndarray, np.ndarray]:
        sizes.append(probs.shape)
        return cutoffs(probs, *args, **keywords)

    monkeypatch.setattr(draw, "cutoffs", spy)
    logits = torch.stack([distribution("peaked", 1)[0], distribution("flat", 1)[0]]).log().numpy()
    ones = np.ones(2)
    draw.draw(logits, ones.astype(np.float32), *columns([(0, 0.9, 0.0), (0, 0.9, 0.0)]), ones / 2)
    draw.draw(logits, ones.astype(np.float32), *columns([(0, 1.0, 0.001), (60, 1.0, 0.001)]), ones / 2)  # min-p alone
    assert sizes == [(2, draw.CANDIDATES), (1, 1003), (2, draw.CANDIDATES)]


def test_every_kept_token_is_drawn_and_no_other():
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(1))
    kept = kept_by_brute_force((logits[0].double() / 0.7).softmax(0), 20, 0.9, 0.01)
    requests = [new_request(seed=s, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01) for s in range(3000)]
    drawn = sample(logits.repeat(3000, 1), metadata_of(requests)).token_ids
    assert set(drawn.tolist()) == kept


def test_filters_that_keep_everything_change_no_draw():
    logits = torch.randn(64, 5003, generator=torch.Generator().manual_seed(1))
    plain = metadata_of([new_request(seed=s, temperature=1.0) for s in range(64)])
    open_filter = metadata_of([new_request(seed=s, temperature=1.0, top_k=5003) for s in range(64)])
    assert np.array_equal(sample(logits.clone(), plain).token_ids, sample(logits.clone(), open_filter).token_ids)


def test_ties_beyond_the_candidates_count_towards_the_mass():
    # top_k 2 keeps all 21, so half of the mass is not reached by the first token. Four candidates do not show that.
    probs = torch.tensor([[0.3] + [0.035] * 20])
    values, unseen = most_likely(probs, 4)
    assert not cutoffs(values, *columns([(2, 0.5, 0.0)]), unseen=unseen)[1].any()
    assert cutoffs(probs.numpy(), *columns([(2, 0.5, 0.0)]))[0].item() == probs[0, 1]
