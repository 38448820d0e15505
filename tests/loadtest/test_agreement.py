"""The comparison of answers: equal servers agree, roundings are told apart, and figures are what they are called."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.agreement import LENGTHS, QUESTIONS, Agreement, Answer, Place, answers_of, divergence, is_same, num_alike
from loadtest.servers import Server, headrace
from tests.support.tiny_model import NAME, write_tiny_model


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / NAME)


def tiny(model: Path, dtype: str) -> Server:
    settings = {"served_model_name": NAME, "load_format": "dummy", "kv_cache_memory": "16MiB"}
    return headrace(dtype, model=model, dtype=dtype, **settings)


@pytest.mark.slow
def test_a_server_agrees_with_itself_and_less_with_its_roundings(tiny_model: Path) -> None:
    questions = QUESTIONS.read_text().splitlines()[:4]
    truth, again, rounded = (answers_of(tiny(tiny_model, dtype), questions) for dtype in ("float32", "float32", "auto"))
    assert all(len(answer) == max(LENGTHS) or answer[-1].token for answer in truth)
    same = Agreement.of(truth, again)
    assert same.same == dict.fromkeys(LENGTHS, 100.0)
    assert same.divergence == 0
    assert Agreement.of(truth, rounded).divergence > 0


def answer(text: str) -> Answer:
    return [Place(letter.encode(), {letter.encode(): -0.1}) for letter in text]


@pytest.mark.parametrize(
    ("ours", "theirs", "alike"), [("abc", "abd", 2), ("abc", "ab", 2), ("", "a", 0), ("a", "a", 1)]
)
def test_answers_part_where_a_token_differs_or_one_has_ended(ours: str, theirs: str, alike: int) -> None:
    assert num_alike(answer(ours), answer(theirs)) == alike
    assert is_same(answer(ours), answer(theirs), 16) == (ours == theirs)
    assert is_same(answer(ours), answer(theirs), alike)


@given(st.lists(st.tuples(st.floats(-6, 6), st.floats(-6, 6)), min_size=3, max_size=12), st.integers(2, 12))
def test_the_divergence_of_what_is_known_is_not_above_the_whole(scores: list[tuple[float, float]], known: int) -> None:
    """By the data processing inequality: several tokens told as one can only hide a difference."""
    logits = np.array(scores).T
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    whole = float((np.exp(logprobs[0]) * (logprobs[0] - logprobs[1])).sum())
    likely = [
        {b"%d" % place: float(row[place]) for place in sorted(range(len(row)), key=lambda at: -row[at])[:known]}
        for row in logprobs
    ]
    seen = divergence(*likely)
    assert -1e-6 <= seen <= whole + 1e-6
    if known >= len(scores):
        assert math.isclose(seen, whole, abs_tol=1e-6)


def test_the_questions_are_many_and_all_different() -> None:
    questions = QUESTIONS.read_text().splitlines()
    assert len(questions) >= 200
    assert len(set(questions)) == len(questions)
    assert all(question == question.strip() and question for question in questions)
