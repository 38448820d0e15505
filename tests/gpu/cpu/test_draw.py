"""The library's draw against the numpy one, which is its definition."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpu.cpu.library import Threads, draw, load_library
from gpu.sampling import draw as reference
from gpu.sampling.columns import SAMPLING_COLUMNS, make_columns
from gpu.sampling.draw import uniform
from gpu.sampling.sampler import Draw, SamplingMetadata
from tests.gpu.native_builds import needs_library
from tests.gpu.sampling_helpers import fastest_draw

pytestmark = [needs_library, pytest.mark.usefixtures("every_build")]


def metadata_of(rows: int, *, seed: int, **parameters: float) -> SamplingMetadata:
    columns = make_columns(SAMPLING_COLUMNS, rows)
    for name, value in parameters.items():
        columns[name][:] = value
    columns["seed"][:] = np.arange(seed, seed + rows)
    return SamplingMetadata(columns=columns, rows=np.arange(rows), positions=np.arange(rows))


def drawn(draw: Draw, logits: torch.Tensor, metadata: SamplingMetadata) -> tuple[np.ndarray, np.ndarray]:
    parameters = [metadata[name] for name in ("temperature", "top_k", "top_p", "min_p")]
    return draw(logits.numpy().copy(), *parameters, uniform(metadata["seed"], metadata.positions))


def fast(logits: torch.Tensor, metadata: SamplingMetadata) -> tuple[np.ndarray, np.ndarray]:
    return drawn(fastest_draw(), logits, metadata)


@settings(max_examples=150, deadline=None)
@given(
    vocab_size=st.sampled_from([1, 15, 16, 97, 1024, 3001]),
    spread=st.sampled_from([0.0, 0.5, 4.0, 30.0]),
    temperature=st.sampled_from([1e-5, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 1000, 10**6]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 0.7, 1.0]),
    seed=st.integers(0, 10**6),
)
# A min-p below all that top-p keeps: what it leaves is still the whole that top-p is a part of.
@example(vocab_size=3001, spread=0.5, temperature=0.3, top_k=0, top_p=0.3, min_p=1e-6, seed=37042)
@example(vocab_size=97, spread=4.0, temperature=2.0, top_k=10**6, top_p=0.9, min_p=1e-6, seed=346061)
def test_every_token_is_the_one_that_the_reference_draws(vocab_size, spread, temperature, top_k, top_p, min_p, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, vocab_size, generator=generator) * spread
    metadata = metadata_of(6, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    seen, finite = fast(logits, metadata)
    expected, _ = drawn(reference.draw, logits, metadata)
    assert finite.all()
    # Both round, so a draw that falls on the border of two tokens, or a filter's on that of two weights, may go either
    # way; the border is then next to the token that was drawn.
    for row in np.flatnonzero(seen != expected):
        weights = ((logits[row] - logits[row].max()) / temperature).double().exp()
        near = _border_distance(weights.numpy(), int(seen[row]), int(expected[row]), metadata, int(row))
        assert near < 1e-5, (row, seen[row], expected[row])


def _border_distance(weights: np.ndarray, seen: int, expected: int, metadata: SamplingMetadata, row: int) -> float:
    """How far the draw, or the sum that top-p cuts, is from where the other token would have been right."""
    top_k, top_p, min_p = (metadata[name][row] for name in ("top_k", "top_p", "min_p"))
    order = np.sort(weights)[::-1]
    floor = max(min_p, order[top_k - 1] if 0 < top_k <= len(order) else 0.0)
    kept = np.where(weights >= floor * (1 - 1e-6), weights, 0.0)
    sums = np.cumsum(order[order >= floor * (1 - 1e-6)])
    distances = [np.abs(sums / sums[-1] - top_p).min()]
    level = order[min(np.searchsorted(sums, top_p * sums[-1]), len(sums) - 1)]
    if top_p < 1:
        kept = np.where(kept >= level * (1 - 1e-6), kept, 0.0)
    cumulative = np.cumsum(kept)
    target = uniform(metadata["seed"], metadata.positions)[row] * cumulative[-1]
    low, high = sorted((seen, expected))
    distances.append(np.abs(cumulative[low : high + 1] - target).min() / cumulative[-1])
    return float(min(distances))


def test_rows_are_drawn_alike_alone_and_together_on_any_number_of_threads():
    logits = torch.randn(40, 5000, generator=torch.Generator().manual_seed(1)) * 3
    metadata = metadata_of(40, temperature=0.9, top_k=0, top_p=0.95, min_p=0.0, seed=5)
    together, _ = fast(logits, metadata)
    library = load_library()
    assert library is not None
    for num_threads in (1, 3):
        other = partial(draw, Threads(library, num_threads))
        assert drawn(other, logits, metadata)[0].tolist() == together.tolist()
    for row in (0, 7, 39):
        part = metadata.drawing(np.array([row]))
        assert fast(logits[row : row + 1], part)[0].tolist() == [together[row]]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 16, 999, 1000])
def test_a_row_that_is_no_distribution_is_told_and_spares_its_neighbours(value: float, place: int):
    logits = torch.randn(3, 1001)
    metadata = metadata_of(3, temperature=1.0, top_k=0, top_p=0.9, min_p=0.0, seed=5)
    clean, _ = fast(logits, metadata)
    logits[1, place] = value
    seen, finite = fast(logits, metadata)
    assert finite.tolist() == [True, False, True]
    assert seen[[0, 2]].tolist() == clean[[0, 2]].tolist()
    _, finite = fast(torch.full((3, 7), -torch.inf), metadata)
    assert not finite.any()


def test_tokens_that_are_forbidden_are_never_drawn():
    logits = torch.full((200, 3000), -torch.inf)
    logits[:, [5, 2999]] = 0.0
    seen, finite = fast(logits, metadata_of(200, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=9))
    assert finite.all()
    assert set(seen.tolist()) == {5, 2999}


FILTERS = [(0, 1.0, 0.0), (0, 0.9, 0.0), (5, 1.0, 0.0), (5, 0.5, 0.0), (0, 1.0, 1.0), (0, 0.9, 1e-6)]


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
@pytest.mark.parametrize("temperature", [0.0, -0.0, 1e-45, 1e-40, 4.2e-39, 1e-38, 1e-20])
def test_a_temperature_too_low_to_divide_by_draws_the_largest(temperature, top_k, top_p, min_p):
    logits = torch.randn(4, 2001, generator=torch.Generator().manual_seed(2))
    logits[1] *= 1e30
    logits[2, 1:] = -torch.inf
    seen, finite = fast(logits, metadata_of(4, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=3))
    assert finite.all()
    assert seen.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e30, 3e38, float("inf")])
def test_the_highest_temperature_draws_all_that_is_allowed_alike(temperature: float):
    logits = torch.full((400, 3000), -torch.inf)
    logits[:, 5], logits[:, 2999] = 4.0, -4.0
    seen, finite = fast(logits, metadata_of(400, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=9))
    assert finite.all()
    assert 100 < np.count_nonzero(seen == 5) < 300
    assert set(seen.tolist()) == {5, 2999}


NAN = float("nan")


@pytest.mark.parametrize(
    ("temperature", "top_p", "min_p"),
    [(NAN, 1.0, 0.0), (NAN, 0.9, 0.0), (-1.0, 0.9, 0.0), (1.0, NAN, 0.0), (1.0, 1.0, NAN), (1.0, 0.9, NAN)],
)
def test_parameters_that_are_no_numbers_are_told_like_logits(temperature: float, top_p: float, min_p: float):
    metadata = metadata_of(3, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)
    for name, value in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        metadata.columns[name][1] = value
    seen, finite = fast(torch.randn(3, 2001), metadata)
    assert finite.tolist() == [True, False, True]
    assert ((seen >= 0) & (seen < 2001)).all()


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_min_p_above_one_keeps_the_largest(top_p: float):
    logits = torch.randn(3, 2001, generator=torch.Generator().manual_seed(4))
    seen, finite = fast(logits, metadata_of(3, temperature=1.0, top_k=0, top_p=top_p, min_p=1.5, seed=5))
    assert finite.all()
    assert seen.tolist() == logits.argmax(-1).tolist()
