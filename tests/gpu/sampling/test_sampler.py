"""The sampler: order of operations, penalties, logprobs, and a row's independence of its batch."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from gpu.sampling.draw import largest
from gpu.sampling.logits import apply_penalties
from gpu.sampling.sampler import SamplingMetadata
from tests.gpu.sampling_helpers import SamplingRows, metadata_of, new_request, sample

VOCAB = 1003  # no multiple of a vector's width


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def test_greedy_rows_take_the_largest_logit_and_the_lowest_id_of_a_tie():
    logits = random_logits(4)
    logits[1, [3, 700]] = 50.0
    logits[2, [0, VOCAB - 1]] = 50.0
    expected = [int(logits[0].argmax()), 3, 0, int(logits[3].argmax())]
    assert sample(logits, metadata_of([new_request(temperature=0.0)] * 4)).token_ids.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_logit_is_torchs_whatever_its_sign_and_dtype(dtype):
    logits = random_logits(200, seed=5)
    logits[50:100] -= 100.0  # nothing but negative numbers
    logits[100:150] = logits[100:150].round()  # ties
    logits[150, :] = 0.0
    logits[151, ::2] = -0.0
    logits[152, :] = float("-inf")
    logits[152, 7] = -3e4
    logits = logits.to(dtype)
    token_ids, finite = largest(logits.float().numpy())
    assert finite.all()
    reference = logits.float()
    assert (reference.gather(1, torch.from_numpy(token_ids).unsqueeze(1)).squeeze(1) == reference.amax(-1)).all()
    unique = (reference == reference.amax(-1, keepdim=True)).sum(-1) == 1
    assert (torch.from_numpy(token_ids) == reference.argmax(-1))[unique].all()
    assert unique.sum() > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("others", [3.0, -3.0])
def test_rows_that_are_not_sound_are_found_among_those_that_are(dtype, others):
    logits = torch.full((6, VOCAB), others).to(dtype)
    negative_nan = torch.tensor([-64], dtype=torch.int16).view(torch.bfloat16).to(dtype)  # what x86 makes of inf - inf
    logits[1, 5] = float("nan")
    logits[2, 6] = negative_nan[0]
    logits[3, 7] = float("inf")
    logits[4, :] = float("-inf")
    logits[5, :9] = float("-inf")
    assert largest(logits.float().numpy())[1].tolist() == [True, False, False, False, False, True]


def test_top_k_1_is_greedy_even_where_logits_tie():
    logits = torch.zeros(50, VOCAB)
    metadata = metadata_of([new_request(seed=seed, temperature=1.5, top_k=1) for seed in range(50)])
    assert sample(logits, metadata).token_ids.tolist() == [0] * 50


def test_a_tiny_temperature_takes_the_largest_logit_without_overflow():
    logits = random_logits(8) * 1e4
    expected = logits.argmax(-1).tolist()
    output = sample(logits, metadata_of([new_request(seed=i, temperature=1e-30) for i in range(8)]))
    assert output.token_ids.tolist() == expected
    assert output.finite.all()


def mixed_requests() -> list:
    return [
        new_request("a", [1, 2, 3], temperature=0.0),
        new_request("b", [4] * 9, temperature=1.0, seed=11),
        new_request("c", [5, 6], temperature=0.7, top_p=0.9, seed=12, logprobs=4),
        new_request("d", [7], temperature=1.3, top_k=30, seed=-13),
        new_request("e", [8, 9], temperature=1.0, min_p=0.1, seed=2**62, logprobs=0),
        new_request("f", [10, 11, 10], temperature=0.0, repetition_penalty=1.5, logprobs=20),
        new_request("g", [1, 12, 12, 13], num_prompt_tokens=1, temperature=1.0, frequency_penalty=1.0, seed=14),
        new_request("h", [2, 2], temperature=2.0, top_p=0.999, seed=15),
        new_request("i", [3, 3], temperature=1.0, logit_bias={5: 3.0, 900: -100.0}, seed=16),
        new_request("j", [1], temperature=0.0, min_tokens=3, stop_token_ids=(17, 18)),
    ]


def test_a_row_samples_the_same_alone_permuted_and_padded():
    requests = mixed_requests()
    logits = random_logits(len(requests))
    alone = [sample(logits[i : i + 1].clone(), metadata_of([r])) for i, r in enumerate(requests)]
    generator = np.random.default_rng(5)
    for padding in (0, 1, 23):
        others = [new_request(f"x{i}", seed=i, temperature=i % 3 / 2, top_p=1 - i % 2 / 10) for i in range(padding)]
        everyone = requests + others
        everything = torch.cat([logits, random_logits(padding, seed=9)])
        places = generator.permutation(len(everyone))
        output = sample(everything[places], metadata_of([everyone[i] for i in places]))
        for i in range(len(requests)):
            place = int(np.flatnonzero(places == i)[0])
            assert output.token_ids[place] == alone[i].token_ids[0]
            assert output.logprobs.get(place) == alone[i].logprobs.get(0)


def test_a_seed_draws_anew_at_every_position():
    logits = torch.zeros(100, VOCAB)
    metadata = metadata_of([new_request(token_ids=[0] * (i + 1), seed=3, temperature=1.0) for i in range(100)])
    assert len(set(sample(logits, metadata).token_ids.tolist())) > 80


def penalize(logits: torch.Tensor, metadata: SamplingMetadata) -> None:
    assert metadata.penalties is not None
    apply_penalties(logits.numpy(), metadata.penalties)


def test_repetition_penalty_is_that_of_transformers():
    logits, penalty = random_logits(3), 1.7
    tokens = [[1, 5, 5, 900], [2, 2, 2, 2], [1002, 0, 7, 0]]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor(tokens), logits.clone())
    metadata = metadata_of([new_request(token_ids=t, num_prompt_tokens=2, repetition_penalty=penalty) for t in tokens])
    penalize(logits, metadata)
    torch.testing.assert_close(logits, expected)


def test_presence_and_frequency_penalties_count_the_output_only():
    logits = torch.zeros(2, 6)
    requests = [
        new_request(token_ids=[1, 1, 2, 3, 3], num_prompt_tokens=2, presence_penalty=0.5, frequency_penalty=0.25),
        new_request(token_ids=[4, 4, 4]),
    ]
    penalize(logits, metadata_of(requests))
    assert logits.tolist() == [[0, 0, -0.75, -1.0, 0, 0], [0] * 6]


def test_penalties_follow_the_tokens_that_are_appended():
    state = SamplingRows(3)
    state.add(1, new_request(token_ids=list(range(300)), frequency_penalty=1.0))
    for token in [5, 400, 5, *range(500, 900)]:
        state.penalized.append(np.array([0, 1]), np.array([1, token]))
    logits = torch.zeros(1, VOCAB)
    penalize(logits, state.select([1], [700]))
    expected = torch.zeros(1, VOCAB)
    expected[0, 5], expected[0, 400], expected[0, 500:900] = -2.0, -1.0, -1.0
    assert torch.equal(logits, expected)


def test_a_row_that_is_used_again_inherits_nothing():
    state = SamplingRows(1)
    state.add(
        0,
        new_request(
            token_ids=[1, 2],
            presence_penalty=1.0,
            logit_bias={1: 5.0},
            min_tokens=9,
            stop_token_ids=(3,),
            logprobs=3,
            top_k=4,
        ),
    )
    state.remove(0)
    state.add(0, new_request(temperature=0.0))
    metadata = state.select([0], [1])
    assert metadata.penalties is None
    assert metadata.bias is None
    assert [metadata[name][0] for name in ("num_logprobs", "top_k", "temperature")] == [-1, 0, 0.0]


def test_stop_tokens_cannot_be_drawn_until_min_tokens_are_there():
    def first_token(num_output_tokens: int) -> int:
        request = new_request(
            token_ids=[1] * (5 + num_output_tokens),
            num_prompt_tokens=5,
            temperature=0.0,
            min_tokens=2,
            stop_token_ids=(8, 9),
            logit_bias={8: 100.0},
        )
        logits = torch.zeros(1, 12)
        logits[0, [4, 9]] = torch.tensor([1.0, 2.0])
        return int(sample(logits, metadata_of([request])).token_ids[0])

    assert [first_token(n) for n in range(4)] == [4, 4, 8, 8]


def test_logit_bias_moves_the_choice_before_temperature():
    logits = torch.zeros(1, 10)
    request = new_request(temperature=1e-3, logit_bias={7: 1.0, 3: 0.5})
    assert sample(logits, metadata_of([request])).token_ids.tolist() == [7]


def test_logprobs_are_those_of_the_raw_logits():
    logits = random_logits(3)
    reference = logits.double().log_softmax(-1)
    requests = [
        new_request(temperature=0.5, seed=1, logprobs=5, logit_bias={3: 100.0}, repetition_penalty=2.0),
        new_request(temperature=0.0),
        new_request(temperature=1.0, seed=2, logprobs=0),
    ]
    output = sample(logits, metadata_of(requests))
    assert set(output.logprobs) == {0, 2}
    first, third = output.logprobs[0], output.logprobs[2]
    assert first.token_id == output.token_ids[0] == 3
    assert math.isclose(first.logprob, float(reference[0, 3]), abs_tol=1e-5)
    assert first.rank == int((reference[0] > reference[0, 3]).sum()) + 1
    best = reference[0].topk(5)
    assert [token for token, _ in first.top] == best.indices.tolist()
    np.testing.assert_allclose([value for _, value in first.top], best.values, atol=1e-5)
    assert third.top == []
    assert math.isclose(third.logprob, float(reference[2, third.token_id]), abs_tol=1e-5)


def test_tokens_with_equal_logits_share_a_rank():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 1.0]])
    request = new_request(temperature=0.0, logprobs=1, logit_bias={4: 100.0})
    assert sample(logits, metadata_of([request])).logprobs[0].rank == 3


def test_more_logprobs_than_tokens_give_all_there_are():
    output = sample(torch.zeros(1, 4), metadata_of([new_request(temperature=0.0, logprobs=20)]))
    assert sorted(token for token, _ in output.logprobs[0].top) == [0, 1, 2, 3]


def test_rows_without_a_finite_distribution_are_reported_and_spare_their_neighbours():
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 50},
        {"temperature": 0.0, "logprobs": 2},
    ]
    requests = [new_request(seed=i, **kind) for kind in kinds for i in range(5)]
    sound = random_logits(len(requests))
    broken = sound.clone()
    for kind in range(4):
        broken[5 * kind + 1] = math.nan
        broken[5 * kind + 2, 17] = math.nan
        broken[5 * kind + 3] = -math.inf
        broken[5 * kind + 4, 17] = math.inf
    output = sample(broken, metadata_of(requests))
    assert output.finite.tolist() == [True, False, False, False, False] * 4
    assert ((output.token_ids >= 0) & (output.token_ids < VOCAB)).all()
    expected = sample(sound, metadata_of(requests))
    assert output.token_ids[::5].tolist() == expected.token_ids[::5].tolist()
