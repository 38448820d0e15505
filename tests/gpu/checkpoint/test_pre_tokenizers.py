"""Every pre-tokenizer name, against fast tokenizers that are built from the sections of the published tokenizer.json.

They share the embedded model's vocabulary, since the names differ in how they cut a text. `tests/integration` has real
vocabularies. HEADRACE_TEST_TEXTS is the number of random texts per name.
"""

import json
import os
import time
from functools import cache
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from gpu.checkpoint import ModelError, is_known_tokenizer
from gpu.checkpoint.gguf_file import GGUFFile
from gpu.checkpoint.gguf_tokenizer import _PRE_TOKENIZERS, tokenizer_from_gguf
from gpu.checkpoint.tokenizers import _CASED
from tests.gpu.checkpoint_files import TinyGGUF
from tests.selection import slow_except
from tests.support.embedded_model import embedded_gguf
from tests.support.random_texts import random_texts

COUNT = int(os.environ.get("HEADRACE_TEST_TEXTS", "200"))
MERGES = 8000  # of the vocabulary: enough for words, signs and digits

GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTES = GPT2 | {"use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


# As of transformers, which has no others.
_SPLITS: tuple[str, ...] = (
    "llama-bpe",
    "llama3",
    "llama-v3",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "lfm2",
    "smaug-bpe",
    "dbrx",
)
_SPLITS += ("tekken", "qwen2", "deepseek-r1-qwen", "qwen35", "gpt-4o", "llama4", "minimax-m2")
STEPS = {name: [split(GGUF_PRE_TOKENIZER_SPLITS[name]), BYTES] for name in _SPLITS}
STEPS |= dict.fromkeys(("glm4", "chatglm-bpe"), STEPS["llama-bpe"])
STEPS |= {name: [GPT2] for name in ("default", "gpt-2", "phi-2", "roberta-bpe", "olmo", "mpt", "modern-bert")}
STEPS |= {name: [DIGITS, GPT2] for name in ("smollm", "refact", "starcoder", "command-r")}
STEPS["kimi-k2"] = [
    split(
        r"[\p{Han}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    BYTES,
]
STEPS["deepseek-coder"] = [split("[\r\n]"), split("\\s?\\p{L}+"), split("\\s?\\p{P}+"), split("[一-龥ࠀ-一가-퟿]+")]
STEPS["deepseek-coder"] += [DIGITS, BYTES]
STEPS["deepseek-llm"] = [
    split("[\r\n]"),
    split(rf"\s?[{_CASED}]+"),  # 60 ranges, which tests/integration compares with ids of the real tokenizer
    split("\\s?[!-/:-~！-／：-～‘-‟　-。]+"),
    split("\\s+$"),
    split("[一-龥ࠀ-一가-퟿]+"),
    DIGITS,
    BYTES,
]
STEPS["deepseek-v3"] = [
    split("\\p{N}{1,3}"),
    split("[一-龥぀-ゟ゠-ヿ]+"),
    split(
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
    ),
    BYTES,
]
STEPS["falcon"] = [
    {"type": "Punctuation", "behavior": "Contiguous"},
    GPT2,
    {"type": "Digits", "individual_digits": False},
    split("[0-9][0-9][0-9]"),
]
WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "smaug-bpe", "glm4"}
WHOLE_WORDS |= {"chatglm-bpe", "tekken", "gpt-4o", "llama4", "kimi-k2"}  # those that were made of tiktoken's files
COMPOSE = {"olmo", "mpt", "modern-bert", "command-r", "qwen2", "deepseek-r1-qwen", "qwen35"}
PIECES = ["▁", "a", "b", "c", "▁a", "ab", "bc", "abc", "▁abc", "é", "▁▁", "\n", "\n\n"]
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]


@cache
def file():
    """Return the embedded model's file with a part of its merges."""
    read = GGUFFile(embedded_gguf())
    merges = read.metadata["tokenizer.ggml.merges"][:MERGES]
    made = {merge.replace(" ", "") for merge in merges}
    tokens = read.metadata["tokenizer.ggml.tokens"]
    types = read.metadata["tokenizer.ggml.token_type"]
    kept = [each for each in zip(tokens, types, strict=True) if len(each[0]) == 1 or each[1] != 1 or each[0] in made]
    read.metadata |= {"tokenizer.ggml.merges": merges, "tokenizer.ggml.tokens": [token for token, _ in kept]}
    read.metadata |= {"tokenizer.ggml.token_type": [kind for _, kind in kept]}
    return read


def ours(name, **metadata):
    file().metadata |= {"tokenizer.ggml.pre": name, "tokenizer.ggml.add_bos_token": False} | metadata
    return tokenizer_from_gguf(file(), 10**6)


def published(name, metadata):
    """Return the fast tokenizer of a family, with the vocabulary of a file."""
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    kinds = zip(vocabulary, metadata["tokenizer.ggml.token_type"], strict=True)
    added = [(token, kind == 3) for token, kind in kinds if kind in (3, 4)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return Tokenizer.from_str(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [
                    {"id": vocabulary[token], "content": token, "special": special} | flags for token, special in added
                ],
                "normalizer": {"type": "NFC"} if name in COMPOSE else None,
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": STEPS[name]},
                "decoder": GPT2,
                "model": {
                    "type": "BPE",
                    "ignore_merges": name in WHOLE_WORDS,
                    "vocab": vocabulary,
                    "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
                },
            }
        )
    )


def test_every_name_has_a_reference():
    assert sorted(STEPS) == sorted(_PRE_TOKENIZERS)


FIRST = {pre: name for name, pre in reversed(_PRE_TOKENIZERS.items())}  # by what the name means; others are aliases


@pytest.mark.parametrize("name", _PRE_TOKENIZERS)
def test_ids_are_those_of_the_fast_tokenizer(name):
    tokenizer, reference = ours(name), published(name, file().metadata)
    is_alias = FIRST[_PRE_TOKENIZERS[name]] != name
    for text in random_texts(COUNT // 10 if is_alias else COUNT):
        ids = tokenizer.encode(text).ids
        assert ids == reference.encode(text).ids, text
        assert tokenizer.decode(ids) == reference.decode(ids)


@pytest.mark.parametrize("name", slow_except(FIRST.values(), *list(FIRST.values())[::4]))
def test_the_time_to_encode_grows_as_the_text(name):
    """The library knows no bound on a regex, so each pattern is tried with what is hard on one."""
    tokenizer = ours(name)
    assert is_known_tokenizer(tokenizer)
    for hard in (" ", "A", "a", "e\u0301", "Ab", "1", ".", "\u3000", " \t", "'", "你", "ǅ", "\u0301", "ー", "ʰ"):
        short, long = (min(seconds(tokenizer, hard * count + " x") for _ in range(2)) for count in (1000, 8000))
        assert long < 30 * max(short, 1e-3), hard  # 8 times as long; 64 times if it grew as the square


def seconds(tokenizer, text):
    started = time.process_time()
    tokenizer.encode(text)
    return time.process_time() - started


@pytest.mark.parametrize(
    ("name", "text", "tokens"),
    [
        ("gpt-4o", "camelCase", ["c", "am", "el", "C", "ase"]),
        ("llama-bpe", "12345", ["1", "2", "3", "4", "5"]),
        ("llama-bpe", "  x", ["Ġ", "Ġx"]),
        ("smollm", "a  1", ["a", "ĠĠ", "1"]),
    ],
)
def test_words_end_where_their_pattern_says(name, text, tokens):
    assert ours(name).encode(text).tokens == tokens


@pytest.mark.parametrize("name", ["granite", "phi", "phi-3", "unheard-of"])
def test_an_unknown_name_is_refused_with_the_name(name):
    with pytest.raises(ModelError, match=f"has the pre-tokenizer '{name}'; supported are default, gpt-2"):
        ours(name)


# ----------------------------------------------------------------------------------------------------- other algorithms


def tokenizer_of(tmp_path, tokens, types, **metadata):
    read = GGUFFile(TinyGGUF(tmp_path / "m.gguf").add_tokenizer(tokens=tokens, types=types).save())
    read.metadata |= {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return tokenizer_from_gguf(read, 10**6)


@pytest.mark.parametrize("lowercase", [None, True, False])
def test_word_piece_has_the_ids_of_bert(tmp_path, lowercase):
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "the",
        "it",
        "in",
        "it's",
        "don",
        "camel",
        "e",
        "你",
        "好",
        "!",
    ]
    words += [
        "1",
        "12",
        "##s",
        "##t",
        "##e",
        "##case",
        "##1",
        "##2",
        "word",
        "Word",
        "##a",
        "E",
        "é",
        "##é",
        "[unused1]",
    ]
    words += [letter for letter in "bcdfghijklmnopqrstuvwxyzETAOIN.,'-=" if letter not in words]
    types = [3] * 5 + [1] * (len(words) - 5)
    stored = [
        word if index < 5 else word[2:] if word.startswith("##") else f"▁{word}" for index, word in enumerate(words)
    ]
    ids = {"unknown_token_id": 1, "cls_token_id": 2, "seperator_token_id": 3}
    options = {} if lowercase is None else {"normalizer.lowercase": lowercase}
    tokenizer = tokenizer_of(tmp_path, stored, types, model="bert", **ids, **options)
    vocabulary = {word: index for index, word in enumerate(words)}
    bert = transformers.BertTokenizer(vocab=vocabulary, do_lower_case=lowercase is not False)
    for text in [*random_texts(COUNT), "the [MASK] in it's", "Élan"]:
        assert tokenizer.encode(text).ids == bert.encode(text), text
        assert tokenizer.encode(text, add_special_tokens=False).ids == bert.encode(text, add_special_tokens=False)
    assert tokenizer.encode("a", "b").ids == bert.encode("a", "b")


def test_gemma_4_merges_as_its_file_says(tmp_path):
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *BYTE_PIECES, *PIECES, "<|turn>"]
    types = [3] * 5 + [6] * 256 + [1] * len(PIECES) + [3]
    merges = ["b c", "a b", "a bc", "▁ ▁", "▁ a", "▁ abc", "\n \n"]
    ids = {"unknown_token_id": 3, "bos_token_id": 2, "eos_token_id": 1, "add_bos_token": True}
    tokenizer = tokenizer_of(tmp_path, tokens, types, model="gemma4", merges=merges, **ids)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs: Any = [tuple(merge.split(" ")) for merge in merges]
    gemma = transformers.GemmaTokenizer(
        vocab=vocabulary, merges=pairs, additional_special_tokens=["<|turn>"]
    ).backend_tokenizer
    for text in [*random_texts(COUNT), "abc  abc<|turn>abc", "aabbcc\n\n\n abc "]:
        expected = gemma.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text).ids == [2, *expected.ids], text
        assert tokenizer.decode(expected.ids) == gemma.decode(expected.ids)


@pytest.mark.parametrize(("architecture", "kept"), [("llama", ["\n"]), ("phi3", [])])
def test_the_control_tokens_of_phi_3_take_the_blanks_behind_them(tmp_path, architecture, kept):
    tokens = ["<unk>", "<s>", "</s>", *BYTE_PIECES, "▁", "a", "▁a", "\n", "<|user|>", "<|endoftext|>"]
    types = [2, 3, 4] + [6] * 256 + [1] * 4 + [4, 3]
    read = GGUFFile(TinyGGUF(tmp_path / "p.gguf").add_tokenizer(tokens=tokens, types=types).save())
    options = {"model": "llama", "scores": [0.0] * len(tokens), "add_space_prefix": False, "add_bos_token": False}
    read.metadata |= {f"tokenizer.ggml.{key}": value for key, value in options.items()}
    read.metadata["general.architecture"] = architecture
    ids = tokenizer_from_gguf(read, 10**6).encode("<|user|>\na<|endoftext|> a").ids
    assert [tokens[token] for token in ids] == ["<|user|>", *kept, "a", "<|endoftext|>", "▁a"]


def test_a_model_that_wants_eos_gets_it_behind_a_text():
    eos = {"tokenizer.ggml.add_eos_token": True}
    assert ours("qwen2", **eos).encode("a").ids[-1] == file().metadata["tokenizer.ggml.eos_token_id"]
    both = ours("qwen2", **eos | {"tokenizer.ggml.add_bos_token": True})
    first, last = (file().metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos"))
    (a,), (b,) = (both.encode(text, add_special_tokens=False).ids for text in "ab")
    assert both.encode("a", "b").ids == [first, a, last, first, b, last]
    file().metadata["tokenizer.ggml.add_eos_token"] = False


def test_a_file_without_bos_needs_none(tmp_path):
    tokens = [*(chr(number) for number in range(33, 127)), "ab"]
    read = GGUFFile(TinyGGUF(tmp_path / "m.gguf").add_tokenizer(pre="lfm2", tokens=tokens, merges=["a b"]).save())
    del read.metadata["tokenizer.ggml.bos_token_id"]
    assert tokenizer_from_gguf(read, 10**6).encode("ab").tokens == ["ab"]
