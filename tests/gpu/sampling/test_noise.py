"""The draws are a pure function of seed and position, and they are uniform."""

from typing import Any

import numpy as np
import pytest
import torch

from gpu.sampling import sampler
from gpu.sampling.draw import uniform
from tests.gpu.sampling_helpers import metadata_of, new_request, sample


def test_seed_zero_gives_the_published_splitmix64_sequence():
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    drawn = uniform(np.zeros(3, np.uint64), np.arange(3))
    assert drawn.tolist() == [(word >> 11) / 2**53 for word in published]


def test_draws_of_neighbouring_seeds_and_positions_look_independent():
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200))
    grid = uniform(seeds.ravel(), positions.ravel()).reshape(200, 200)
    assert ((grid >= 0) & (grid < 1)).all()
    assert len(np.unique(grid)) == grid.size
    # Three standard deviations of a correlation coefficient over 39,800 pairs.
    for one, other in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1]), (grid[1:, :-1], grid[:-1, 1:])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 3 / np.sqrt(one.size)


def test_tokens_are_drawn_as_often_as_their_probability_says():
    probs = torch.tensor([0.4, 0.2, 0.15, 0.1, 0.08, 0.05, 0.015, 0.005])
    draws = 20_000
    metadata = metadata_of([new_request(seed=seed, temperature=1.0) for seed in range(draws)])
    drawn = sample(probs.log().repeat(draws, 1), metadata).token_ids
    expected = probs.double().numpy() * draws
    statistic = ((np.bincount(drawn, minlength=8) - expected) ** 2 / expected).sum()
    assert statistic < 24.32  # chi-square, 7 degrees of freedom, p = 0.001


def test_frequencies_follow_temperature_and_filters():
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0])
    draws = 20_000
    request: dict[str, Any] = {"seed": 7, "temperature": 0.8, "top_k": 4, "top_p": 0.9}
    requests = [new_request(token_ids=[0] * (1 + i % 50), **request | {"seed": i // 50}) for i in range(draws)]
    drawn = sample(logits.repeat(draws, 1), metadata_of(requests)).token_ids
    # By hand: of the best four, the first three hold 0.935 of the mass and the first two 0.812.
    probs = (logits[:3].double() / 0.8).softmax(0).numpy()
    assert set(drawn.tolist()) == {0, 1, 2}
    expected = probs * draws
    statistic = ((np.bincount(drawn) - expected) ** 2 / expected).sum()
    assert statistic < 13.82  # chi-square, 2 degrees of freedom, p = 0.001


def test_a_draw_is_the_inverse_of_the_cumulative_distribution_down_to_the_rarest_token(
    monkeypatch: pytest.MonkeyPatch,
):
    logits = torch.full((99, 1001), -18.4)  # one token has all but 1e-5, a thousand have 1e-8 each
    logits[:, 0] = 0.0
    uniforms = 1 - np.linspace(1e-7, 9.9e-6, 99)
    monkeypatch.setattr(sampler, "uniform", lambda seeds, positions: uniforms)
    cumulative = logits[0].softmax(-1).double().numpy().cumsum()
    expected = np.searchsorted(cumulative, uniforms * cumulative[-1], side="right")
    assert len(set(expected.tolist())) == 99
    metadata = metadata_of([new_request(temperature=1.0)] * 99)
    assert sample(logits, metadata).token_ids.tolist() == expected.tolist()


def test_the_largest_uniform_falls_on_a_token_that_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sampler, "uniform", lambda seeds, positions: np.full(len(seeds), 1 - 2.0**-53))
    logits = torch.randn(200, 1003, generator=torch.Generator().manual_seed(0))
    logits[:, -3:] = -torch.inf
    kinds: list[dict[str, Any]] = [{}, {"top_k": 40}]
    for kind in kinds:
        metadata = metadata_of([new_request(temperature=1.0, **kind)] * 200)
        drawn = torch.from_numpy(sample(logits.clone(), metadata).token_ids)
        level = logits.topk(kind.get("top_k", 1000)).values[:, -1]
        assert (logits[torch.arange(200), drawn] >= level).all()
