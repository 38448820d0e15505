"""Encoders against transformers in float32: every family and variant, pooling, heads, batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.messages import Pooling
from gpu.kernels.dispatch import interpreted
from tests.gpu.encoder_models import ENCODERS, cosine, encoded, hidden_states, make_checkpoint, opened, prompts

SAME = 0.999999
VARIANTS = [name if name == "bert" else pytest.param(name, marks=pytest.mark.slow) for name in ENCODERS]


@pytest.mark.parametrize("name", VARIANTS)
def test_vectors_are_those_of_transformers_in_order_of_similarity(name: str, tmp_path: Path) -> None:
    model, given = make_checkpoint(tmp_path, ENCODERS[name]), prompts()
    found = encoded(tmp_path, given)
    wanted = [hidden_states(model, each).mean(0) for each in given]
    assert min(map(cosine, found, wanted)) > SAME
    ranks = [np.argsort([cosine(vectors[0], each) for each in vectors]) for vectors in (found, wanted)]
    assert ranks[0].tolist() == ranks[1].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODERS)
def test_a_prompt_in_a_batch_has_the_vector_that_it_has_alone(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, ENCODERS[name])
    executor = opened(tmp_path)
    together = encoded(executor, prompts())
    for tokens, vector in zip(prompts(), together, strict=True):
        (alone,) = encoded(executor, [tokens])
        np.testing.assert_allclose(alone, vector, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ENCODERS if name != "embedding-gemma"])
@pytest.mark.parametrize("labels", [1, 3])
def test_logits_of_pairs_are_those_of_transformers(name: str, labels: int, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, ENCODERS[name], labels=labels)
    given, second = prompts()[1:], [3, 20, 0, 1, 9]
    found = encoded(tmp_path, given, Pooling.CLASSIFY, second_segment=second)
    for tokens, start, logits in zip(given, second, found, strict=True):
        types = {"token_type_ids": torch.tensor([[int(0 < start <= place) for place in range(len(tokens))]])}
        with torch.no_grad():
            has_types = getattr(model.config, "type_vocab_size", 1) > 1
            wanted = model(torch.tensor([tokens]), **types if has_types else {}).logits[0].numpy()
        np.testing.assert_allclose(logits, wanted, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "modern-bert", "embedding-gemma"])
def test_the_kernel_of_cuda_devices_gives_the_vectors_of_transformers(name: str, tmp_path: Path) -> None:
    model, given = make_checkpoint(tmp_path, ENCODERS[name]), prompts()
    with interpreted():
        found = encoded(tmp_path, given)
    assert min(map(cosine, found, (hidden_states(model, each).mean(0) for each in given))) > SAME
