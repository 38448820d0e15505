"""Ranks that each have the logits of some tokens sample what one samples that has all."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpu.sampling import draw as reference
from gpu.sampling.draw import CANDIDATES, Shards
from gpu.sampling.logits import LogitsMask
from gpu.sampling.sampler import SamplerOutput, SamplingMetadata, sample
from tests.gpu.sampling_helpers import metadata_of, new_request

SIZES = (512, 352, 35)  # uneven, and the last below the number of candidates
VOCAB = sum(SIZES)
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.5, "min_p": 0.01},
    {"temperature": 2.0, "top_k": 700},  # beyond the candidates of all ranks
    {"temperature": 3.0, "top_p": 0.999},
    {"temperature": 9.0, "top_p": 0.7, "min_p": 1e-6},  # min-p keeps more than the candidates
    {"temperature": 1.0, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 0, "logit_bias": {3: 5.0, 600: -9.0, 870: 8.0}},
    {"temperature": 0.8, "repetition_penalty": 1.7, "presence_penalty": 0.5},
]


class Meeting:
    """What ranks that are threads put side by side."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._parts: list[Any] = [None] * size
        self.widest = 0

    def gather(self, rank: int) -> Callable[[Any, Sequence[int]], Any]:
        def together(values: Any, sizes: Sequence[int]) -> Any:
            assert values.shape[1] == sizes[rank]
            self.widest = max(self.widest, sum(sizes))
            self._parts[rank] = values.copy()
            self._barrier.wait()
            whole = np.concatenate(self._parts, axis=1)
            self._barrier.wait()
            return whole

        return together


def by_ranks(logits: np.ndarray, metadata: SamplingMetadata) -> tuple[list[SamplerOutput], int]:
    """What each rank has sampled, and how many numbers of a row they put together at most."""
    meeting = Meeting(len(SIZES))

    def rank(index: int) -> SamplerOutput:
        shards = Shards(index, SIZES, meeting.gather(index), lambda hidden: hidden)
        return sample(logits[:, shards.first : shards.last].copy(), metadata, reference.draw, shards)

    with ThreadPoolExecutor(len(SIZES)) as threads:
        return list(threads.map(rank, range(len(SIZES)))), meeting.widest


def random_logits(rows: int) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal((rows, VOCAB)) * 3).astype(np.float32)


def requests(parameters: list[dict[str, Any]]) -> list[Any]:
    return [
        new_request(f"r{i}", [5 * i % 400, 400 + i, 880], num_prompt_tokens=2, seed=i, **each)
        for i, each in enumerate(parameters)
    ]


def assert_same(found: list[SamplerOutput], expected: SamplerOutput) -> None:
    for output in found:
        assert output.token_ids.tolist() == expected.token_ids.tolist()
        assert output.finite.tolist() == expected.finite.tolist()
        assert output.logprobs == expected.logprobs


def test_all_parameters_in_one_batch() -> None:
    metadata = metadata_of(requests(PARAMETERS * 20))
    logits = random_logits(len(metadata.rows))
    found, _ = by_ranks(logits, metadata)
    assert_same(found, sample(logits.copy(), metadata, reference.draw))
    assert {int(np.searchsorted(np.cumsum(SIZES), token, "right")) for token in found[0].token_ids} == {0, 1, 2}


@pytest.mark.parametrize("parameters", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 20, "top_p": 0.95}])
def test_logits_are_not_gathered(parameters: dict[str, Any]) -> None:
    found, widest = by_ranks(random_logits(8), metadata_of(requests([parameters] * 8)))
    assert len({int(token) for token in found[0].token_ids}) > 1
    assert widest <= (2 * CANDIDATES + SIZES[-1] if "top_k" in parameters else 2 * len(SIZES))


def test_masks_are_of_the_tokens_of_each_rank() -> None:
    """One that allows two tokens, on two ranks; one of a shorter vocabulary; one that allows nothing."""
    bits = np.zeros((3, -(-VOCAB // 32)), np.uint32)
    for row, token in ((0, 40), (0, 890), (1, 511), (1, 512)):
        bits[row, token // 32] |= np.uint32(1 << token % 32)
    masked = LogitsMask(rows=np.array([0, 1, 3]), bits=bits)
    short = LogitsMask(rows=np.array([1]), bits=bits[1:2, :17])
    for mask in (masked, short):
        metadata = replace(metadata_of(requests([{"temperature": 5.0}, {"temperature": 0.0}] * 2)), mask=mask)
        expected = sample(random_logits(4), metadata, reference.draw)
        assert_same(by_ranks(random_logits(4), metadata)[0], expected)
    assert expected.token_ids[1] in (511, 512)


def test_rows_that_are_not_sound_are_found_wherever_they_are_not() -> None:
    metadata = metadata_of(requests([{"temperature": 0.0}, {"temperature": 1.0}] * 4))
    logits = random_logits(8)
    logits[2, 3] = logits[3, 890] = np.nan
    logits[4, 600] = logits[5, 600] = np.inf
    logits[6:] = -np.inf
    for output in by_ranks(logits, metadata)[0]:
        assert output.finite.tolist() == [True, True] + [False] * 6
        assert ((output.token_ids >= 0) & (output.token_ids < VOCAB)).all()


def test_the_lowest_of_equal_tokens_is_taken() -> None:
    logits = random_logits(2)
    logits[0, [510, 520, 899 - 1]] = 50.0
    logits[1, [898, 600]] = 50.0
    assert by_ranks(logits, metadata_of(requests([{"temperature": 0.0}] * 2)))[0][2].token_ids.tolist() == [510, 600]
