"""Tokenizing: what comes with a model is foreign, and what it cannot read is the request's error."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from app.config.settings import Settings
from app.serving.loading import open_files
from app.serving.prompts import open_prompts, tokenize, without_special
from engine.errors import InvalidRequest
from gpu.checkpoint.tokenizers import wordpiece
from protocol.openai.chat import ChatCompletionRequest
from tests.engine.helpers import byte_level_tokenizer, sentencepiece_tokenizer


def test_a_regex_that_goes_astray_on_a_text_is_the_requests_error() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "!": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    assert tokenize(tokenizer, "aaa!", param="prompt") == [0, 0, 0, 1]
    with pytest.raises(InvalidRequest, match="tokenizer fails on prompt") as caught:
        tokenize(tokenizer, "a" * 30 + "!", param="prompt")
    assert caught.value.param == "prompt"


def word_pieces() -> Tokenizer:
    return wordpiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "some", "##e", "plain", "word", "##s"], {}, source="here")


@pytest.mark.parametrize("make", [byte_level_tokenizer, sentencepiece_tokenizer, word_pieces])
def test_a_tokenizer_without_special_tokens_differs_from_its_copy_by_nothing(make: Callable[[], Tokenizer]) -> None:
    whole = make()
    whole.add_special_tokens(["<|end|>", AddedToken("<s>", lstrip=True, rstrip=True)])
    whole.add_tokens(["plain", AddedToken("word", single_word=True), AddedToken("Cased", normalized=True)])
    plain, copy = without_special(whole), Tokenizer.from_str(whole.to_str())
    assert plain.to_str() == copy.to_str()
    assert plain.get_vocab() == copy.get_vocab()
    copy.encode_special_tokens = True
    text = "some plain word, words <s> and <|end|> Cased cased <|end|><s>"
    for around in (True, False):
        assert plain.encode(text, add_special_tokens=around).ids == copy.encode(text, add_special_tokens=around).ids
    assert set(plain.encode(text, add_special_tokens=False).ids).isdisjoint(map(whole.token_to_id, ("<|end|>", "<s>")))


def test_the_first_prompt_that_spells_a_special_token_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings()
    encoder = open_prompts(settings, open_files(settings, lambda *_: None))
    monkeypatch.setattr("app.serving.prompts.Tokenizer", None)  # nothing can make another one any more
    messages = [{"role": "user", "content": "a <|im_end|> b"}]
    body = ChatCompletionRequest.model_validate({"messages": messages})
    spelled = anyio.run(encoder.encode_chat, body, 1000)
    (end,) = encoder._tokenizer.encode("<|im_end|>", add_special_tokens=False).ids
    assert spelled.count(end) == encoder.decode(spelled).count("<|im_end|>") - 1
