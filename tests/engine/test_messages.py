"""`SamplingParams` checks the types of its fields when it is made."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from engine.errors import InvalidRequest
from engine.frontend.llm import LLM
from engine.messages import MAX_READ_OFTEN, SamplingParams
from tests.engine.helpers import byte_level_tokenizer, make_core

TOKENIZER = byte_level_tokenizer()
VOCAB_SIZE = TOKENIZER.get_vocab_size()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_tokens", 4.7, "a whole number, got 4.7"),
        ("max_tokens", "3", "a whole number, got '3'"),
        ("max_tokens", True, "a whole number, got True"),
        ("n", None, "a whole number, got None"),
        ("temperature", "hot", "a number, got 'hot'"),
        ("temperature", False, "a number, got False"),
        ("ignore_eos", "false", "True or False, got 'false'"),
        ("ignore_eos", 0, "True or False, got 0"),
        ("stop", b"Answer:", "a string or a list of strings, got b'Answer:'"),
        ("stop", ["a", 5], "a string or a list of strings, got ['a', 5]"),
        ("bad_words", 5, "a string or a list of strings, got 5"),
        ("stop_token_ids", 5, "a list of token ids, got 5"),
        ("stop_token_ids", ["a"], "a list of token ids, got ['a']"),
        ("allowed_token_ids", [1.5], "a list of token ids, got [1.5]"),
        ("logit_bias", {"5": 1}, "a dict of token ids to numbers, got {'5': 1}"),
        ("logit_bias", {5: "1"}, "a number, got '1'"),
        ("structured_output", {"regex": "a"}, "a StructuredOutput, got {'regex': 'a'}"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name: str, value: Any, expected: str) -> None:
    for make in (SamplingParams, lambda **fields: msgspec.structs.replace(SamplingParams(), **fields)):
        with pytest.raises(InvalidRequest) as refused:
            make(**{name: value})
        assert (str(refused.value), refused.value.param) == (f"{name} must be {expected}.", name)


def test_many_ids_are_looked_at_once() -> None:
    many = SamplingParams(allowed_token_ids=(*range(MAX_READ_OFTEN), "a"))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="^allowed_token_ids must be a list of token ids, got a tuple"):
        many.check(VOCAB_SIZE)


def test_what_means_the_same_is_taken() -> None:
    given: dict[str, Any] = {
        "stop": ["a"],
        "stop_token_ids": [5],
        "max_tokens": np.int64(3),
        "temperature": np.float32(1),
    }
    assert SamplingParams(**given) == SamplingParams(stop=("a",), stop_token_ids=(5,), max_tokens=3)
    nothing: dict[str, Any] = {"stop": None, "stop_token_ids": None, "logit_bias": None, "seed": None}
    assert SamplingParams(**nothing) == SamplingParams()
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(SamplingParams(**given)), type=SamplingParams)
    assert again == SamplingParams(**given)


def test_a_string_is_one_stop_and_one_bad_word() -> None:
    text: dict[str, Any] = {"stop": "Answer:", "bad_words": "Paris"}
    assert SamplingParams(**text) == SamplingParams(stop=("Answer:",), bad_words=("Paris",))
    llm = LLM(make_core(vocab_size=VOCAB_SIZE), TOKENIZER)
    (free,) = llm.generate("The question", SamplingParams(temperature=0.0, max_tokens=40))
    answer = free.choices[0].text
    stop: Any = answer[10:16]
    (stopped,) = llm.generate("The question", SamplingParams(temperature=0.0, max_tokens=40, stop=stop))
    assert stopped.choices[0].text == answer[: answer.index(stop)]
    assert stopped.choices[0].stop_reason == stop
