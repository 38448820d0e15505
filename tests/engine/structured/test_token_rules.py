"""What clients forbid token by token, against the definition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer

from engine.detokenizer import Vocabulary
from engine.structured import manager as manager_module
from engine.structured.compiler import GrammarCompiler
from engine.structured.manager import StructuredOutputManager
from engine.structured.matchers import TokenRules, bad_word_token_ids, mask_of
from tests.engine.helpers import byte_level_tokenizer, make_request
from tests.support.embedded_model import embedded_gguf

VOCAB_SIZE = 90
WORDS = -(-VOCAB_SIZE // 32)
IDS = st.integers(0, VOCAB_SIZE - 1)


def allowed_by(rules: TokenRules) -> set[int]:
    mask = np.zeros(WORDS, dtype=np.uint32)
    rules.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE]).tolist())


@given(
    allowed=st.none() | st.sets(IDS, min_size=1),
    bad_words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6),
    output=st.lists(st.integers(0, 3), max_size=30),
)
def test_a_token_is_allowed_if_it_is_listed_and_completes_no_bad_word(allowed, bad_words, output):
    rules = TokenRules(allowed=None if allowed is None else mask_of(sorted(allowed)), bad_words=bad_words)
    for length in range(len(output) + 1):
        expected = set(range(VOCAB_SIZE)) if allowed is None else set(allowed)
        for token_id in list(expected):
            text = [*output[:length], token_id]
            if any(text[-len(word) :] == word for word in bad_words):
                expected.discard(token_id)
        found = allowed_by(rules)
        if not expected:  # the sampler gets a token, and the request ends with it
            assert found == set(range(VOCAB_SIZE))
            assert not rules.accept(0)
            assert rules.refusal is not None
            assert rules.error == rules.refusal.message
            assert "bad_words" in rules.error
            return
        assert found == expected
        assert rules.error is None
        if length < len(output):
            assert not rules.accept(output[length])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from gpu.checkpoint import open_model

    return open_model(str(embedded_gguf())).tokenizer


def test_a_word_is_bad_at_the_start_of_a_text_and_behind_a_blank(tokenizer: Tokenizer):
    found = bad_word_token_ids(tokenizer, [" Paris", "Paris"])
    assert sorted(tokenizer.decode(list(word)) for word in found) == [" Paris", "Paris"]
    assert all(len(word) == 1 for word in found)


def test_the_choices_of_a_request_share_one_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Sequence[int]] = []

    def noted(token_ids: Sequence[int]) -> NDArray[np.uint32]:
        made.append(token_ids)
        return mask_of(token_ids)

    monkeypatch.setattr(manager_module, "mask_of", noted)
    manager = StructuredOutputManager(
        GrammarCompiler(Vocabulary(byte_level_tokenizer()), vocab_size=300, eos_token_ids=(1,)), lambda plan: []
    )
    for allowed in ((1, 2), (3,), (1, 2)):
        for _ in range(50):
            matcher = manager.on_add(make_request([1], allowed_token_ids=(*allowed,)))
            assert matcher is not None
            mask = np.empty(10, np.uint32)
            matcher.fill(mask)
            assert mask[0] == sum(1 << token_id for token_id in allowed)
    assert len(made) == 3
