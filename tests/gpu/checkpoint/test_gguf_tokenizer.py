"""The tokenizer that is built from GGUF metadata, against two others: transformers' and a reference in plain Python.

transformers' reading of a GGUF file knows the pre-tokenizers of Llama 3 and Qwen, but gives SmolLM GPT-2's, without the
step that cuts digits apart first (its "a  1" is Ġ Ġ 1, where SmolLM's own tokenizer.json makes it ĠĠ 1). So it is
compared after that step was put in place; the reference needs no such help.
"""

import inspect
import json
import re
from functools import cache
from itertools import pairwise

import pytest
import regex
from tokenizers import Tokenizer, pre_tokenizers

from gpu.checkpoint import ModelError, open_model
from gpu.checkpoint.gguf_file import GGUFFile
from tests.gpu.checkpoint_files import ALPHABET, TINY, TinyGGUF, byte_alphabet, random_weights
from tests.support.embedded_model import embedded_gguf

TEXTS = [
    "What is the capital of France?",
    "  leading, trailing  and   inner    spaces   ",
    "it's we'll they've I'M DON'T rock'n'roll",
    "def f(x):\n    if x  > 10:\n\t\treturn {'a': [1, 22, 333]}\n\n\n    return  4444\r\n",
    "1234567890 3.14159 1,000,000 ½ ² Ⅷ ٣٤ １２ a  1  22   333\n4",
    "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 ❤️‍🔥 🇫🇷 family",
    "你好，世界。こんにちは世界 안녕하세요 สวัสดี مرحبا שלום हिन्दी",
    "e\u0301 vs é, a\u0308\u0323, Z\u0351\u036b\u0343, ﬁ, \u200bzero\u00a0width\u2028sep",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_end|><|im_end|> <|im_end <|IM_END|> <empty_output>x<jupyter_code>",
    "\x00\x01\x7f\ufffd\U0010ffff",
    "",
    " ",
    "\n\n",
    "supercalifragilisticexpialidocious " * 5,
]
BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class ReferenceBPE:
    """Byte-level BPE as its papers tell it: cut by patterns, then join the pair of lowest rank until there is none."""

    def __init__(self, metadata: dict, patterns: list[str]) -> None:
        self.ids = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {merge: rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
        types = metadata["tokenizer.ggml.token_type"]
        special = sorted((token for token, kind in zip(self.ids, types, strict=True) if kind == 3), key=len)
        self.special = re.compile("(" + "|".join(map(re.escape, reversed(special))) + ")") if special else None
        self.patterns = [regex.compile(pattern) for pattern in patterns]
        self.alphabet = byte_alphabet()

    def encode(self, text: str) -> list[int]:
        ids = []
        for piece in self.special.split(text) if self.special else [text]:
            if self.special and self.special.fullmatch(piece):
                ids.append(self.ids[piece])
            else:
                ids += [self.ids[part] for word in self.words(piece) for part in self.merged(word)]
        return ids

    def words(self, text: str) -> list[str]:
        words = [text]
        for pattern in self.patterns:
            words = [part for word in words for part in isolated(pattern, word)]
        return words

    def merged(self, word: str) -> list[str]:
        parts = [self.alphabet[byte] for byte in word.encode()]
        while True:
            pairs = [self.ranks.get(f"{left} {right}", 1 << 30) for left, right in pairwise(parts)]
            if not pairs or min(pairs) == 1 << 30:
                return parts
            best = pairs.index(min(pairs))
            parts[best : best + 2] = [parts[best] + parts[best + 1]]


def isolated(pattern: regex.Pattern, text: str) -> list[str]:
    parts, end = [], 0
    for match in pattern.finditer(text):
        parts += [text[end : match.start()], match.group()]
        end = match.end()
    return [part for part in [*parts, text[end:]] if part]


@cache
def ours() -> Tokenizer:
    return open_model(str(embedded_gguf())).tokenizer


@pytest.fixture(scope="module")
def theirs() -> Tokenizer:
    from transformers import AutoTokenizer

    path = embedded_gguf()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
    return tokenizer


@pytest.mark.slow
def test_ids_and_text_are_those_of_transformers(theirs):
    for text in TEXTS:
        ids = ours().encode(text).ids
        assert ids == theirs.encode(text).ids, text
        for skip in (True, False):
            assert ours().decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours().get_vocab(with_added_tokens=True) == theirs.get_vocab(with_added_tokens=True)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_plain_byte_level_bpe(text):
    reference = ReferenceBPE(GGUFFile(embedded_gguf()).metadata, [r"\p{N}", BYTE_LEVEL])
    assert ours().encode(text).ids == reference.encode(text)


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(text):
    assert ours().decode(ours().encode(text).ids, skip_special_tokens=False) == text


def test_digits_stand_alone_and_spaces_before_them_stay_together():
    assert ours().encode("a  12").tokens == ["a", "ĠĠ", "1", "2"]


def test_special_tokens_are_one_token_each_and_vanish_when_skipped():
    ids = ours().encode("<|im_start|>Hi<|im_end|>").ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert ours().decode(ids) == "Hi"


def test_no_token_is_added_that_the_model_does_not_want():
    assert ours().encode("Hi").ids == ours().encode("Hi", add_special_tokens=False).ids


def test_the_embedded_models_own_pre_tokenizer_is_built():
    built = json.loads(ours().to_str())
    kinds = [(step["type"], step.get("individual_digits")) for step in built["pre_tokenizer"]["pretokenizers"]]
    assert kinds == [("Digits", True), ("ByteLevel", None)]


def tiny_tokenizer(tmp_path, **changes) -> Tokenizer:
    gguf = TinyGGUF(tmp_path / "m.gguf").add_weights(random_weights(TINY))
    add_bos = changes.pop("add_bos", None)
    if add_bos is not None:
        gguf.writer.add_add_bos_token(add_bos)
    return open_model(str(gguf.add_tokenizer(**changes).save())).tokenizer


@pytest.mark.parametrize(
    ("pre", "patterns"),
    [
        ("smollm", [r"\p{N}", BYTE_LEVEL]),
        ("gpt-2", [BYTE_LEVEL]),
        ("default", [BYTE_LEVEL]),
        ("llama-bpe", [LLAMA3]),
        ("qwen2", [LLAMA3.replace("{1,3}", "")]),
    ],
)
def test_every_pre_tokenizer_cuts_as_its_pattern_says(tmp_path, pre, patterns):
    """With merges that join digits, spaces and letters, a cut in the wrong place shows."""
    merges = ["1 2", "12 3", "Ġ Ġ", "ĠĠ Ġ", "Ċ Ċ", "Ġ 1", "e r", "' t", ". Ċ", "Ġ a", "' D", "( a", "ĉ r"]
    tokens = [*byte_alphabet(), *(merge.replace(" ", "") for merge in merges)]
    tokenizer = tiny_tokenizer(tmp_path, pre=pre, tokens=tokens, merges=merges, add_bos=False)
    reference = ReferenceBPE(GGUFFile(tmp_path / "m.gguf").metadata, patterns)
    composed = [text for text in TEXTS if "e\u0301" not in text]  # Qwen composes characters first
    for text in [*composed, "123123 12 .\n\n (a) DON'T 'D  12\n\n\n  1", "err\n   \n"]:
        assert tokenizer.encode(text).ids == reference.encode(text), text


def test_the_patterns_are_those_of_transformers():
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    assert inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default == LLAMA3
    assert LLAMA3.replace("{1,3}", "") == PRETOKENIZE_REGEX


def test_qwen_composes_characters_before_it_cuts(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path, pre="qwen2")
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("é").ids


def test_llama_3_takes_a_whole_word_that_no_merge_makes(tmp_path):
    tokens = [*ALPHABET, "hello"]
    assert tiny_tokenizer(tmp_path, pre="llama-bpe", tokens=tokens, add_bos=False).encode("hello").ids == [
        len(ALPHABET)
    ]


def test_a_bos_token_is_put_first_where_the_model_wants_one(tmp_path):
    assert tiny_tokenizer(tmp_path, pre="llama-bpe").encode("a").ids == [1, ord("a")]
    assert tiny_tokenizer(tmp_path, pre="llama-bpe", add_bos=False).encode("a").ids == [ord("a")]
    added = tiny_tokenizer(tmp_path, pre="smollm", add_bos=True)
    assert added.encode("a").ids == [1, ord("a")]
    assert added.encode("a", add_special_tokens=False).ids == [ord("a")]


def test_user_defined_tokens_are_whole_but_not_skipped(tmp_path):
    tokens = [*ALPHABET, "<tool_call>", "<|end|>"]
    tokenizer = tiny_tokenizer(tmp_path, tokens=tokens, types=[1] * 257 + [4, 3])
    ids = tokenizer.encode("a<tool_call>b<|end|>").ids
    assert ids == [ord("a"), 257, ord("b"), 258]
    assert tokenizer.decode(ids) == "a<tool_call>b"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "rwkv"}, "'rwkv'; supported in GGUF files are 'gpt2'"),
        ({"pre": "bloom"}, "'bloom'; supported are default, gpt-2, phi-2, roberta-bpe, olmo, mpt, modern-bert, smollm"),
        ({"merges": ["not in"]}, "merges do not fit"),
        ({"merges": ["alone"]}, "merges do not fit"),
        ({"tokens": [*ALPHABET, "!"]}, "a token twice"),
        ({"types": [1, 2, 3]}, "3 token_type entries for 257 tokens"),
        ({"types": [*[1] * 256, 7]}, "'th' has the type 7; known types are 0 to 6"),
        ({"types": [-1, *[1] * 256]}, "has the type -1; known types are 0 to 6"),
    ],
)
def test_a_tokenizer_that_cannot_be_built_says_why(tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        tiny_tokenizer(tmp_path, **changes)
