"""Tokenizing: what comes with a model is foreign, and what it cannot read is the request's error."""

from __future__ import annotations

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from app.prompts import tokenize
from engine.errors import InvalidRequest


def test_a_regex_that_goes_astray_on_a_text_is_the_requests_error() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "!": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    assert tokenize(tokenizer, "aaa!", param="prompt") == [0, 0, 0, 1]
    with pytest.raises(InvalidRequest, match="cannot read prompt") as caught:
        tokenize(tokenizer, "a" * 30 + "!", param="prompt")
    assert caught.value.param == "prompt"
