"""Vocabularies of real models in GGUF files: against ids that the models' own tokenizers made, and fast tokenizers.

The files and their texts with ids are those with which llama.cpp is tested. HEADRACE_TEST_TEXTS is the number of random
texts per file.
"""

import unicodedata
from functools import cache
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

from gpu.checkpoint.gguf_file import GGUFFile
from gpu.checkpoint.gguf_tokenizer import tokenizer_from_gguf
from tests.gpu.checkpoint.test_pre_tokenizers import COUNT, published
from tests.support.llama_cpp_sources import unpack
from tests.support.random_texts import random_texts

BYTE_LEVEL = ["command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "mpt", "qwen2", "qwen35"]
BYTE_LEVEL += ["refact", "starcoder"]
OTHERS = ["bert-bge", "gemma-4", "llama-spm", "phi-3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vocabularies")
    unpack("models/ggml-vocab-", path)
    return path


@cache
def ours(path: Path) -> tuple[GGUFFile, Tokenizer]:
    file = GGUFFile(path)
    return file, tokenizer_from_gguf(file, 10**6)


@pytest.mark.parametrize("name", BYTE_LEVEL + OTHERS)
def test_ids_are_those_of_the_models_own_tokenizer(folder: Path, name: str) -> None:
    path = folder / f"ggml-vocab-{name}.gguf"
    _, tokenizer = ours(path)
    with open(f"{path}.inp", newline="") as texts, open(f"{path}.out") as ids:
        cases = zip(texts.read().split("\n__ggml_vocab_test__\n"), ids.read().split("\n"), strict=False)
        pairs = [(text, [int(token) for token in line.split()]) for text, line in cases]
    assert len(pairs) > 40
    for text, expected in pairs:
        if name == "qwen35" and unicodedata.normalize("NFC", text) != text:
            continue  # these ids are llama.cpp's, which does not compose characters; Qwen's tokenizer does
        assert tokenizer.encode(text, add_special_tokens=False).ids == expected, text


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_byte_level_ids_are_those_of_the_fast_tokenizer(folder: Path, name: str) -> None:
    file, tokenizer = ours(folder / f"ggml-vocab-{name}.gguf")
    compare(tokenizer, published(name, file.metadata))


@pytest.mark.parametrize("name", OTHERS)
def test_other_ids_are_those_of_the_fast_tokenizer(folder: Path, name: str) -> None:
    path = folder / f"ggml-vocab-{name}.gguf"
    file, tokenizer = ours(path)
    if name == "bert-bge":
        tokens, kinds = (file.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
        pairs = zip(tokens, kinds, strict=True)
        words = [token if kind == 3 else token[1:] if token[0] == "\u2581" else f"##{token}" for token, kind in pairs]
        bert = transformers.BertTokenizer(vocab={word: index for index, word in enumerate(words)})
        compare(tokenizer, bert.backend_tokenizer)
    else:
        architecture, metadata, _ = get_gguf_tokenizer(str(path))
        if name == "llama-spm":  # as its own tokenizer.json, which puts a space before a text that begins with spaces
            architecture = "phi3"
        compare(tokenizer, convert_gguf_tokenizer(architecture, metadata)[0])


def compare(tokenizer: Tokenizer, reference: Tokenizer) -> None:
    for text in random_texts(COUNT, seed=1):
        expected = reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False).ids == expected, text
