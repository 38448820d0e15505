"""GGUF files of strangers: whatever they claim, they are refused by a sentence that names what is wrong, or served.

Each trap is a small honest model with one lie in it. Each is sprung in a process that may take 1 GiB and 10 s.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.gpu.checkpoint_files import TinyGGUF
from tests.gpu.foreign_files import Loader
from tests.gpu.lying_files import MODEL, WEIGHTS, put, tiny_gguf


def with_value(key: str, value: object) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        model = tiny_gguf(folder / "m.gguf").add_weights(WEIGHTS)
        put(model, key, value)
        return model.save()

    return make


def with_tensor(name: str, values: np.ndarray) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        model = tiny_gguf(folder / "m.gguf").add_weights(WEIGHTS)
        model.writer.add_tensor(name, values)
        return model.save()

    return make


def with_tokens(**changes: object) -> Callable[[Path], Path]:
    return lambda folder: TinyGGUF(folder / "m.gguf", MODEL).add_tokenizer(**changes).add_weights(WEIGHTS).save()


def raw_gguf(pairs: bytes, num_pairs: int = 1, num_tensors: int = 0) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / "m.gguf"
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_pairs) + pairs)
        return path

    return make


def raw_pair(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


def many_bytes(folder: Path) -> Path:
    """An array of bytes that would be a list of ten times the memory."""
    path = raw_gguf(raw_pair(b"x", 9, struct.pack("<IQ", 0, 2**29)))(folder)
    with path.open("r+b") as file:
        file.truncate(2**29 + 2**10)  # a hole: it takes no room on the disk
    return path


def overlapping_tensors(folder: Path) -> Path:
    path = tiny_gguf(folder / "m.gguf").add_weights(WEIGHTS).save()
    data = path.read_bytes()
    name = b"blk.1.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8 + 4
    path.write_bytes(data[:at] + struct.pack("<Q", 0) + data[at + 8 :])
    return path


def linear_scaling(folder: Path, factor: float) -> Path:
    model = tiny_gguf(folder / "m.gguf").add_weights(WEIGHTS)
    put(model, "llama.rope.scaling.type", "linear")
    put(model, "llama.rope.scaling.factor", factor)
    return model.save()


ZEROS = np.zeros((8,), dtype=np.float32)
A, CONTEXT = "llama.attention.", "llama.context_length"
GGUF_TRAPS: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "20 million layers": (with_value("llama.block_count", 20_000_000), ["llama.block_count", "20000000", "1 to 1,024"]),
    "1,000 layers in a file of two": (with_value("llama.block_count", 1000), ["missing", "1000 layers"]),
    "no layer": (with_value("llama.block_count", 0), ["llama.block_count", "got 0"]),
    "layers as a text": (with_value("llama.block_count", "2"), ["llama.block_count", "'2'"]),
    "layers as true": (with_value("llama.block_count", True), ["llama.block_count", "True"]),
    "context of 2^31": (with_value(CONTEXT, 2**31), [CONTEXT, "2147483648", "1 to 16,777,216 tokens"]),
    "context of 64 M": (with_value(CONTEXT, 2**26), [CONTEXT, "67108864"]),
    "context of 2^63": (with_value(CONTEXT, 2**62), [CONTEXT, str(2**62)]),
    "negative context": (with_value(CONTEXT, -1), [CONTEXT, "got -1"]),
    "hidden size of 2^31": (with_value("llama.embedding_length", 2**31), ["llama.embedding_length", "2147483648"]),
    "inner size of 2^31": (with_value("llama.feed_forward_length", 2**31), ["llama.feed_forward_length", "2147483648"]),
    "another inner size": (with_value("llama.feed_forward_length", 128), ["mlp.", "[128, 64]", "[64, 64]"]),
    "2^31 heads": (with_value(A + "head_count", 2**31), [A + "head_count", "2147483648", "1 to 2,048 heads"]),
    "no head": (with_value(A + "head_count", 0), [A + "head_count", "got 0"]),
    "heads that do not divide": (with_value(A + "head_count_kv", 3), ["num_attention_heads (4)", "(3)"]),
    "no key-value head": (with_value(A + "head_count_kv", 0), [A + "head_count_kv", "got 0"]),
    "heads of size 0": (with_value(A + "key_length", 0), [A + "key_length", "got 0"]),
    "window of -5": (with_value(A + "sliding_window", -5), [A + "sliding_window", "got -5"]),
    "window of 2^32 - 1": (with_value(A + "sliding_window", 2**32 - 1), [A + "sliding_window", "4294967295"]),
    "infinite epsilon": (with_value(A + "layer_norm_rms_epsilon", math.inf), ["rms_epsilon", "got inf"]),
    "epsilon of NaN": (with_value(A + "layer_norm_rms_epsilon", math.nan), ["rms_epsilon", "got nan"]),
    "infinite theta": (with_value("llama.rope.freq_base", math.inf), ["llama.rope.freq_base", "got inf"]),
    "theta of 0": (with_value("llama.rope.freq_base", 0.0), ["llama.rope.freq_base", "got 0.0"]),
    "BOS beyond the vocabulary": (with_value("tokenizer.ggml.bos_token_id", 5000), ["BOS", "5000", "272"]),
    "EOS beyond the vocabulary": (with_value("tokenizer.ggml.eos_token_id", 2**32 - 1), ["EOS", "4294967295"]),
    "padding beyond the vocabulary": (with_value("tokenizer.ggml.padding_token_id", 9999), ["9999"]),
    "alignment of 2^60": (with_value("general.alignment", 2**60), ["general.alignment", str(2**60)]),
    "a chat template of a number": (with_value("tokenizer.chat_template", 7), ["tokenizer.chat_template", "7"]),
    "a chat template of 2 MB": (with_value("tokenizer.chat_template", "x" * 2**21), ["chat_template", "2,097,152"]),
    "a chat template that multiplies": (with_value("tokenizer.chat_template", "{{ 'a' * 9999999999 }}"), []),
    "a chat template of parentheses": (
        with_value("tokenizer.chat_template", "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}"),
        ["chat template", "nested"],
    ),
    "a tensor without a name": (with_tensor("", ZEROS), ["''", "unknown"]),
    "a tensor without a dot": (with_tensor("weight", ZEROS), ["'weight'", "unknown"]),
    "blk.0.weight": (with_tensor("blk.0.weight", ZEROS), ["'blk.0.weight'", "unknown"]),
    "a name of a line break": (with_tensor("a\nb.weight", ZEROS), [r"'a\nb.weight'"]),
    "a layer beyond the last": (
        with_tensor("blk.2.attn_norm.weight", ZEROS),
        ["blk.2.attn_norm", "unknown"],
    ),
    "rope_freqs of zeros": (with_tensor("rope_freqs.weight", ZEROS), ["rope_freqs.weight", "got 0.0"]),
    "rope_freqs of NaN": (with_tensor("rope_freqs.weight", ZEROS + np.float32("nan")), ["rope_freqs.weight", "nan"]),
    "tensors in the same place": (overlapping_tensors, ["overlap", "blk.1.ffn_up.weight"]),
    "2^63 pairs": (raw_gguf(b"", num_pairs=2**63), ["9,223,372,036,854,775,808 metadata pairs", "65,536"]),
    "2^63 tensors": (raw_gguf(b"", 0, num_tensors=2**63), ["9,223,372,036,854,775,808 tensors", "65,536"]),
    "a key of 2^63 bytes": (raw_gguf(struct.pack("<Q", 2**63)), ["runs past its end"]),
    "an array of 2^63": (raw_gguf(raw_pair(b"x", 9, struct.pack("<IQ", 0, 2**63))), ["'x' claims", "4,194,304"]),
    "512 MB of bytes": (many_bytes, ["'x' claims 536,870,912 numbers"]),
    "one of several parts": (with_value("split.count", 2), ["one of 2 parts"]),
    "an empty token": (with_tokens(tokens=[""], merges=()), ["id 1", "1 tokens"]),
    "a token twice": (with_tokens(tokens=["a", "b", "c", "a"], merges=()), ["a token twice"]),
    "a merge of unknown tokens": (with_tokens(merges=("x yz",)), ["merges do not fit"]),
    "fewer types than tokens": (with_tokens(types=[1, 1]), ["2 token_type entries for 257 tokens"]),
}
GGUF_TRAPS |= {
    f"linear scaling by {value}": (
        partial(linear_scaling, factor=value),
        ["llama.rope.scaling.factor", f"got {value}", "0.01 to 10000"],
    )
    for value in (0.0, -1.0, math.nan, math.inf)
}


@pytest.mark.slow
@pytest.mark.parametrize("trap", GGUF_TRAPS)
def test_a_gguf_file_that_lies_is_refused_by_name(trap: str, tmp_path: Path, loader: Loader) -> None:
    make, words = GGUF_TRAPS[trap]
    outcome = loader.load(make(tmp_path))
    if words:
        assert outcome.kind in ("ModelError", "ChatTemplateError"), outcome
    assert outcome.is_allowed, outcome
    assert [word for word in words if word not in outcome.message] == [], outcome


def test_an_honest_file_is_served_within_these_limits(tmp_path: Path, loader: Loader) -> None:
    """Or every trap above would be refused for the wrong reason."""
    assert loader.load(tiny_gguf(tmp_path / "m.gguf").add_weights(WEIGHTS).save()).kind == "token"


def test_a_context_of_16_million_takes_memory_for_what_is_served(tmp_path: Path, loader: Loader) -> None:
    outcome = loader.load(with_value(CONTEXT, 2**24)(tmp_path))
    assert outcome.kind == "token", outcome
