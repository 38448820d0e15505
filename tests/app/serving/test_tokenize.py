"""Tokenizing: what comes with a model is foreign, and what it cannot read is the request's error."""

from __future__ import annotations

import anyio
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from app.config.settings import Settings
from app.serving.loading import open_files
from app.serving.prompts import open_prompts, tokenize
from engine.errors import InvalidRequest
from protocol.openai.chat import ChatCompletionRequest


def test_a_regex_that_goes_astray_on_a_text_is_the_requests_error() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "!": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    assert tokenize(tokenizer, "aaa!", param="prompt") == [0, 0, 0, 1]
    with pytest.raises(InvalidRequest, match="tokenizer fails on prompt") as caught:
        tokenize(tokenizer, "a" * 30 + "!", param="prompt")
    assert caught.value.param == "prompt"


def test_the_first_prompt_that_spells_a_special_token_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings()
    encoder = open_prompts(settings, open_files(settings, lambda *_: None))
    encoder.prepare()
    monkeypatch.setattr("app.serving.prompts.Tokenizer", None)  # nothing can make another one any more
    messages = [{"role": "user", "content": "a <|im_end|> b"}]
    body = ChatCompletionRequest.model_validate({"messages": messages})
    spelled = anyio.run(encoder.encode_chat, body, 1000)
    (end,) = encoder._tokenizer.encode("<|im_end|>", add_special_tokens=False).ids
    assert spelled.count(end) == encoder.decode(spelled).count("<|im_end|>") - 1
