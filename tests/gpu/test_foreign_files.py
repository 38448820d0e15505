"""Model files of strangers: whatever they claim, they are refused by a sentence that names what is wrong, or served.

Each trap is a small honest model with one lie in it. Each is sprung in a process that may take 1 GiB and 10 s.
"""

from __future__ import annotations

import base64
import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gpu.checkpoint.tokenizer_steps import check_steps
from tests.gpu.checkpoint_files import ALPHABET, TINY, TinyGGUF, random_weights
from tests.gpu.foreign_files import Loader

MODEL = replace(TINY, vocab_size=272, hidden_size=64, intermediate_size=64, num_attention_heads=4, head_dim=16)
WEIGHTS = {name: values * 0.02 for name, values in random_weights(MODEL).items()}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def loader() -> Iterator[Loader]:
    with Loader() as loader:
        yield loader


# ------------------------------------------------------------------------------------------------ GGUF


def tiny_gguf(path: Path) -> TinyGGUF:
    return TinyGGUF(path, MODEL).add_tokenizer()


def put(model: TinyGGUF, key: str, value: object, kind: gguf.GGUFValueType | None = None) -> None:
    """Set a metadata key, in the place of what was there."""
    if kind is None:
        fits = not isinstance(value, int) or 0 <= value < 2**32
        integer = gguf.GGUFValueType.UINT32 if fits else gguf.GGUFValueType.INT64
        types = gguf.GGUFValueType
        kind = {int: integer, float: types.FLOAT32, str: types.STRING, bool: types.BOOL}[type(value)]
    model.writer.kv_data[0].pop(key, None)
    model.writer.add_key_value(key, value, kind)


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
    "a tensor without a name": (with_tensor("", ZEROS), ["''", "with no place"]),
    "a tensor without a dot": (with_tensor("weight", ZEROS), ["'weight'", "with no place"]),
    "blk.0.weight": (with_tensor("blk.0.weight", ZEROS), ["'blk.0.weight'", "with no place"]),
    "a name of a line break": (with_tensor("a\nb.weight", ZEROS), [r"'a\nb.weight'"]),
    "a layer beyond the last": (
        with_tensor("blk.2.attn_norm.weight", ZEROS),
        ["blk.2.attn_norm", "with no place"],
    ),
    "rope_freqs of zeros": (with_tensor("rope_freqs.weight", ZEROS), ["rope_freqs.weight", "got 0.0"]),
    "rope_freqs of NaN": (with_tensor("rope_freqs.weight", ZEROS + np.float32("nan")), ["rope_freqs.weight", "nan"]),
    "tensors in the same place": (overlapping_tensors, ["overlap", "blk.1.ffn_up.weight"]),
    "2^63 pairs": (raw_gguf(b"", num_pairs=2**63), ["9,223,372,036,854,775,808 metadata pairs", "65,536"]),
    "2^63 tensors": (raw_gguf(b"", 0, num_tensors=2**63), ["9,223,372,036,854,775,808 tensors", "65,536"]),
    "a key of 2^63 bytes": (raw_gguf(struct.pack("<Q", 2**63)), ["runs past its end"]),
    "an array of 2^63": (raw_gguf(raw_pair(b"x", 9, struct.pack("<IQ", 0, 2**63))), ["'x' claims", "4,194,304"]),
    "512 MB of bytes": (many_bytes, ["'x' claims 536,870,912 numbers"]),
    "one of several parts": (with_value("split.count", 2), ["one of several parts"]),
    "an empty token": (with_tokens(tokens=[""], merges=()), ["id 1", "1 tokens"]),
    "a token twice": (with_tokens(tokens=["a", "b", "c", "a"], merges=()), ["a token twice"]),
    "a merge of unknown tokens": (with_tokens(merges=("x yz",)), ["merges do not fit"]),
    "fewer types than tokens": (with_tokens(types=[1, 1]), ["257 tokens have 2 types"]),
}
GGUF_TRAPS |= {
    f"linear scaling by {value}": (
        partial(linear_scaling, factor=value),
        ["llama.rope.scaling.factor", f"got {value}", "0.01 to 10000"],
    )
    for value in (0.0, -1.0, math.nan, math.inf)
}


@pytest.mark.parametrize("trap", GGUF_TRAPS)
def test_a_gguf_file_that_lies_is_refused_by_name(trap: str, tmp_path: Path, loader: Loader) -> None:
    make, words = GGUF_TRAPS[trap]
    outcome = loader.load(make(tmp_path))
    if words:
        assert outcome.kind in ("ModelError", "ChatTemplateError"), outcome
    assert outcome.is_allowed, outcome
    assert [word for word in words if word not in outcome.message] == [], outcome


# ------------------------------------------------------------------------------------------------ Hugging Face


def tokenizer_json(**changes: object) -> str:
    model = {"type": "BPE", "vocab": {token: index for index, token in enumerate(ALPHABET)}, "merges": ["t h"]}
    whole: dict[str, object] = {"version": "1.0", "added_tokens": [], "model": model, "decoder": {"type": "ByteLevel"}}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    whole |= {"normalizer": None, "pre_tokenizer": byte_level, "post_processor": None}
    return json.dumps(whole | {"decoder": byte_level} | changes)


def directory(folder: Path) -> Path:
    folder = folder / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(tokenizer_json())
    save_file({name: torch.from_numpy(w) for name, w in WEIGHTS.items()}, folder / "model.safetensors")
    return folder


def with_json(name: str = "config.json", **values: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / name
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(old | values))

    return spoil


def with_text(name: str, content: str | bytes | Callable[[], str | bytes]) -> Callable[[Path], object]:
    """What is large is made by a function, since both workers of a run would hold it from beginning to end."""

    def spoil(folder: Path) -> None:
        text = content() if callable(content) else content
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)

    return spoil


def with_model(**model: object) -> Callable[[Path], object]:
    """Another model in tokenizer.json."""
    return with_text("tokenizer.json", lambda: tokenizer_json(model={"type": "BPE", **model}))


def with_steps(**sections: list[dict[str, object]]) -> Callable[[Path], object]:
    """Sequences of steps in tokenizer.json."""
    return with_text("tokenizer.json", lambda: tokenizer_json(**sequences(sections)))


def sequences(sections: dict[str, list[dict[str, object]]]) -> dict[str, object]:
    names = {"pre_tokenizer": "pretokenizers", "post_processor": "processors"}
    return {
        section: {"type": "Sequence", names.get(section, section + "s"): steps} for section, steps in sections.items()
    }


def replacing(pattern: str, content: str, kind: str = "String") -> dict[str, object]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def charsmap(*texts: str) -> dict[str, object]:
    """SentencePiece's map of letters to `texts`, with a trie of which nothing leads to them."""
    data = struct.pack("<II", 4, 0) + b"".join(text.encode() + b"\0" for text in texts)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def template(*special: str, times: int = 1) -> dict[str, object]:
    pieces = [{"Sequence": {"id": "A", "type_id": 0}}] * times
    tokens = {name: {"id": name, "ids": [0], "tokens": [name]} for name in special}
    pieces = [*({"SpecialToken": {"id": name, "type_id": 0}} for name in special), *pieces]
    return {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": tokens}


def added_token(token_id: int, content: str) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": True, **flags}


def with_header(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """The weights' header after `change`, which may return the text that takes its place."""

    def spoil(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        changed = change(header)
        text = (changed if isinstance(changed, str) else json.dumps(header)).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return spoil


def with_length(length: int) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        with (folder / "model.safetensors").open("r+b") as file:
            file.write(struct.pack("<Q", length))

    return spoil


def pipe_for(name: str) -> Callable[[Path], None]:
    return lambda folder: os.mkfifo(folder / name)


def pipe_for_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "a.safetensors")


NORM = "model.norm.weight"
INDEX = "model.safetensors.index.json"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
WINDOW: dict[str, Any] = {"sliding_window": 8, "use_sliding_window": True}
DIRECTORY_TRAPS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "20 million layers": (with_json(num_hidden_layers=20_000_000), ["num_hidden_layers", "20000000", "1 to 1,024"]),
    "a number as a text": (with_json(hidden_size="64"), ["hidden_size", "'64'"]),
    "a number as true": (with_json(num_key_value_heads=True), ["num_key_value_heads", "True"]),
    "a number with a fraction": (with_json(vocab_size=272.5), ["vocab_size", "272.5"]),
    "a number of 400 digits": (with_json(rms_norm_eps=10**400), ["rms_norm_eps", "1,329 bits"]),
    "a number of 5,000 digits": (
        with_text("config.json", json.dumps(CONFIG)[:-1] + ', "head_dim": ' + "9" * 5000 + "}"),
        ["config.json cannot be read", "4300"],
    ),
    "no number at all": (with_json(intermediate_size=None), ["intermediate_size", "None"]),
    "context of 2^31": (with_json(max_position_embeddings=2**31), ["max_position_embeddings", "2147483648"]),
    "infinite epsilon": (with_json(rms_norm_eps=math.inf), ["rms_norm_eps", "inf"]),
    "theta of NaN": (with_json(rope_theta=math.nan), ["rope_theta", "nan"]),
    "theta of a list": (with_json(rope_theta=[1]), ["rope_theta", "an array of 1"]),
    "heads of size 15": (with_json(head_dim=15), ["head_dim must be even", "15"]),
    "more heads than elements": (with_json(num_attention_heads=128), ["head_dim", "got 0"]),
    "scaling that is a text": (with_json(rope_scaling="linear"), ["rope_scaling", "'linear'"]),
    "scaling by 0": (with_json(rope_scaling={"type": "linear", "factor": 0}), ["factor", "got 0"]),
    "scaling by NaN": (with_json(rope_scaling={"type": "linear", "factor": math.nan}), ["factor", "nan"]),
    "scaling from a context of 0": (
        with_json(rope_scaling=LLAMA3 | {"original_max_position_embeddings": 0}),
        ["original_max_position_embeddings", "got 0"],
    ),
    "scaling with equal factors": (
        with_json(rope_scaling=LLAMA3 | {"low_freq_factor": 4.0}),
        ["low_freq_factor (4) must be below high_freq_factor (4)"],
    ),
    "window of 0": (with_json(**WINDOW | {"sliding_window": 0}), ["sliding_window", "got 0"]),
    "window of -5": (with_json(**WINDOW | {"sliding_window": -5}), ["sliding_window", "got -5"]),
    "more layer types than layers": (
        with_json(**WINDOW, layer_types=["sliding_attention"] * 9),
        ["layer_types", "2 layers", "an array of 9"],
    ),
    "unknown layer types": (with_json(**WINDOW, layer_types=["x", {}]), ["layer_types"]),
    "tied as a text": (with_json(tie_word_embeddings="false"), ["tie_word_embeddings", "'false'"]),
    "another vocabulary than the weights'": (with_json(vocab_size=300), ["[272, 64]", "[300, 64]"]),
    "EOS of true": (with_json(eos_token_id=True), ["eos_token_id", "True"]),
    "no EOS": (with_json(eos_token_id=None), ["EOS", "eos_token_id"]),
    "BOS of a text": (with_json(bos_token_id="<s>"), ["bos_token_id", "'<s>'"]),
    "BOS beyond the vocabulary": (with_json(bos_token_id=272), ["BOS", "272"]),
    "EOS of a text elsewhere": (
        with_json("generation_config.json", eos_token_id="x"),
        ["generation_config.json", "'x'"],
    ),
    "a deep configuration": (with_text("config.json", "[" * 200_000), ["config.json", "nested too deeply"]),
    "a key twice": (
        with_text("config.json", json.dumps(CONFIG)[:-1] + ',"vocab_size": 9}'),
        ["'vocab_size' occurs twice"],
    ),
    "a configuration that is a list": (with_text("config.json", "[]"), ["config.json must hold a JSON object"]),
    "a configuration that is not UTF-8": (with_text("config.json", b"\xff\xfe"), ["config.json cannot be read"]),
    "a configuration of 100 MB": (with_text("config.json", lambda: b" " * 10**8), ["100,000,000 bytes", "1,048,576"]),
    "a configuration that is a pipe": (pipe_for("tokenizer_config.json"), ["tokenizer_config.json is not a file"]),
    "a template that is a pipe": (pipe_for("chat_template.jinja"), ["chat_template.jinja is not a file"]),
    "a template that is not UTF-8": (with_text("chat_template.jinja", b"\xff"), ["chat_template.jinja", "utf-8"]),
    "a template of 2 MB": (with_text("chat_template.jinja", "x" * 2**21), ["chat_template.jinja", "2,097,152"]),
    "a template that is a number": (with_json("tokenizer_config.json", chat_template=7), ["chat_template", "got 7"]),
    "added tokens that are numbers": (
        with_json("tokenizer_config.json", eos_token="a", added_tokens_decoder={"1": 2}),
        ["added_tokens_decoder", "got 1 and 2"],
    ),
    "added tokens of 5,000 digits": (
        with_json("tokenizer_config.json", eos_token="a", added_tokens_decoder={"9" * 5000: {}}),
        ["added_tokens_decoder"],
    ),
    "a tokenizer of nothing": (with_text("tokenizer.json", "{}"), ["tokenizer.json cannot be read"]),
    "a tokenizer without tokens": (
        with_model(vocab={}, merges=[]),
        ["vocabulary is empty"],
    ),
    "a tokenizer with an id of 2^32 - 1": (
        with_model(vocab={"a": 2**32 - 1}, merges=[]),
        ["'a'", "4,294,967,295"],
    ),
    "a tokenizer that panics": (
        with_text(
            "tokenizer.json", tokenizer_json(model={"type": "BPE", "vocab": {"a": 0, "ab": 1}, "merges": ["a b"]})
        ),
        ["tokenizer.json cannot be read"],
    ),
    "a tokenizer of brackets": (with_text("tokenizer.json", "[" * 10**6), ["tokenizer.json cannot be read"]),
    "a tokenizer of 100 MB": (
        with_text("tokenizer.json", lambda: b" " * 10**8),
        ["tokenizer.json", "100,000,000 bytes"],
    ),
    "a configuration of objects": (
        with_text("config.json", lambda: json.dumps(CONFIG)[:-1] + ', "x": [' + "{}," * 20_000_000 + "0]}"),
        ["config.json has", "1,048,576"],
    ),
    "a tokenizer of objects": (
        with_text("tokenizer.json", lambda: tokenizer_json()[:-1] + ', "x": [' + "{}," * 20_000_000 + "0]}"),
        ["tokenizer.json cannot be read", "1,048,576 objects"],
    ),
    "a normalizer that multiplies": (
        with_steps(normalizer=[replacing("q", "q" * 65_536)] * 3),
        ["normalizer Replace", "65,536 characters", "up to 64"],
    ),
    "a normalizer that doubles": (
        with_steps(normalizer=[replacing("l", "ll")] * 34),
        ["normalizer", "128 times", "Replace"],
    ),
    "a normalizer that puts a text between letters": (
        with_steps(normalizer=[replacing("", "xxx", "Regex")] * 9),
        ["normalizer", "256 times", "Replace"],
    ),
    "a normalizer that spells bytes": (with_steps(normalizer=[{"type": "ByteLevel"}] * 9), ["256 times", "ByteLevel"]),
    "a normalizer without types": (with_steps(normalizer=[{"prepend": "x" * 10**6}]), ["normalizer", "with a type"]),
    "a normalizer that prepends": (
        with_steps(normalizer=[{"type": "Prepend", "prepend": "x" * 10**7}]),
        ["normalizer Prepend", "10,000,000 characters"],
    ),
    "a normalizer with a map": (with_steps(normalizer=[charsmap("q" * 1000)]), ["1,000 times", "Precompiled"]),
    "a normalizer of too many steps": (with_steps(normalizer=[{"type": "NFC"}] * 65), ["normalizer", "up to 64 steps"]),
    "a normalizer within a normalizer": (
        with_steps(normalizer=[{"type": "Sequence", "normalizers": [replacing("l", "l" * 64)] * 9}]),
        ["4,096 times"],
    ),
    "words that are spelled as bytes": (
        with_steps(pre_tokenizer=[{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}] * 30),
        ["pre_tokenizer", "256 times", "ByteLevel"],
    ),
    "a template that doubles": (
        with_steps(post_processor=[template(times=2)] * 30),
        ["post_processor", "128 times", "TemplateProcessing"],
    ),
    "a decoder that multiplies": (
        with_steps(decoder=[replacing("l", "l" * 64)] * 4),
        ["decoder", "4,096 times", "Replace"],
    ),
    "a decoder with a regex": (with_steps(decoder=[replacing("(x*)*y", "", "Regex")]), ["decoder Replace", "regex"]),
    "a decoder that ends words everywhere": (
        with_steps(decoder=[{"type": "BPEDecoder", "suffix": ""}] * 34),
        ["decoder", "128 times", "BPEDecoder"],
    ),
    "a prefix of 10 MB": (
        with_model(vocab={"a": 0}, merges=[], continuing_subword_prefix="x" * 10**7),
        ["continuing_subword_prefix", "10,000,000 characters"],
    ),
    "a token of 30 MB": (
        with_text("tokenizer.json", lambda: tokenizer_json(added_tokens=[added_token(257, "Z" * 30_000_000)])),
        ["'ZZZ", "30,000,000 characters", "4,096"],
    ),
    "a token of 5,000 letters": (with_model(vocab={"a": 0, "b" * 5000: 1}, merges=[]), ["'bbb", "5,000 characters"]),
    "70,000 added tokens": (
        with_text(
            "tokenizer.json",
            lambda: tokenizer_json(added_tokens=[added_token(i, f"<{i}>") for i in range(70_000)]),
        ),
        ["added_tokens", "65,536", "an array of 70,000"],
    ),
    "weights that are a pipe": (
        pipe_for_weights,
        ["a.safetensors", "not a file"],
    ),
    "a header longer than the file": (with_length(2**40), ["1,099,511,627,776 bytes"]),
    "a header of 2^64 - 1": (with_length(2**64 - 1), ["18,446,744,073,709,551,615 bytes"]),
    "a file of three bytes": (with_text("model.safetensors", "abc"), ["model.safetensors cannot be read"]),
    "data out of range": (with_header(lambda h: h[NORM].update(data_offsets=[2**40, 2**40 + 256])), ["leave a hole"]),
    "data that overlaps": (with_header(lambda h: h[NORM].update(data_offsets=[0, 256])), ["overlap", NORM]),
    "data the wrong way round": (with_header(lambda h: h[NORM].update(data_offsets=[256, 0])), [NORM, "-256 bytes"]),
    "offsets that are texts": (with_header(lambda h: h[NORM].update(data_offsets=["0", "9"])), [NORM, "data_offsets"]),
    "a shape that is not the data's": (with_header(lambda h: h[NORM].update(shape=[2**62])), [NORM, "256 bytes"]),
    "a shape of true": (with_header(lambda h: h[NORM].update(shape=[True])), [NORM, "[True]"]),
    "weights of 8 bits": (with_header(lambda h: h[NORM].update(dtype="F8_E4M3")), [NORM, "F8_E4M3", "F64, F32, F16"]),
    "a tensor that is a list": (with_header(lambda h: h.update({NORM: []})), [NORM, "an array of 0"]),
    "a tensor twice": (
        with_header(lambda h: json.dumps(h)[:-1] + f', "{NORM}": {json.dumps(h[NORM])}}}'),
        ["occurs twice"],
    ),
    "a deep header": (with_header(lambda h: '{"a":' * 100_000), ["nested too deeply"]),
    "a missing tensor": (with_header(lambda h: h.update({"x": h.pop(NORM)})), ["'x'", "with no place"]),
    "an index of a file elsewhere": (
        with_json(INDEX, weight_map={NORM: "../../x.safetensors"}),
        ["to a file beside it"],
    ),
    "an index of an absolute path": (with_json(INDEX, weight_map={NORM: "/etc/passwd"}), ["to a file beside it"]),
    "an index of a folder": (with_json(INDEX, weight_map={NORM: ".."}), ["to a file beside it"]),
    "an index of a very long name": (with_json(INDEX, weight_map={NORM: "x" * 5000}), ["to a file beside it"]),
    "an index with a null byte": (with_json(INDEX, weight_map={NORM: "a\0b"}), ["to a file beside it"]),
    "an index that is a list": (with_json(INDEX, weight_map=[1]), ["to a file beside it"]),
    "an index of a missing file": (with_json(INDEX, weight_map={NORM: "b.safetensors"}), ["lacks b.safetensors"]),
}


@pytest.mark.parametrize("trap", DIRECTORY_TRAPS)
def test_a_directory_that_lies_is_refused_by_name(trap: str, tmp_path: Path, loader: Loader) -> None:
    spoil, words = DIRECTORY_TRAPS[trap]
    folder = directory(tmp_path)
    spoil(folder)
    outcome = loader.load(folder)
    assert outcome.kind == "ModelError", outcome
    assert [word for word in words if word not in outcome.message] == [], outcome


METASPACE: dict[str, object] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
HONEST_STEPS: dict[str, dict[str, list[dict[str, object]]]] = {
    "Llama 2's": {
        "normalizer": [{"type": "Prepend", "prepend": "▁"}, replacing(" ", "▁")],
        "decoder": [
            replacing("▁", " "),
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
        "post_processor": [template("t")],
    },
    "Llama 3's": {
        "pre_tokenizer": [
            {"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}"}, "behavior": "Isolated", "invert": False}
        ],
        "post_processor": [template("t")],
    },
    "SentencePiece's": {
        "normalizer": [charsmap("صلى الله عليه وسلم", "x"), replacing(" {2,}", "▁", "Regex")],  # U+FDFA
        "pre_tokenizer": [METASPACE],
    },
    "many of them": {"normalizer": [{"type": "NFC"}] * 60},
}


@pytest.mark.parametrize("steps", HONEST_STEPS)
def test_the_steps_of_known_tokenizers_are_within_bounds(steps: str) -> None:
    check_steps(json.loads(tokenizer_json(**sequences(HONEST_STEPS[steps]))), "a tokenizer")


def test_honest_files_are_served_within_these_limits(tmp_path: Path, loader: Loader) -> None:
    """Or every trap above would be refused for the wrong reason."""
    assert loader.load(tiny_gguf(tmp_path / "m.gguf").add_weights(WEIGHTS).save()).kind == "token"
    assert loader.load(directory(tmp_path)).kind == "token"


def test_a_context_of_16_million_takes_memory_for_what_is_served(tmp_path: Path, loader: Loader) -> None:
    outcome = loader.load(with_value(CONTEXT, 2**24)(tmp_path))
    assert outcome.kind == "token", outcome
    folder = directory(tmp_path)
    with_json(max_position_embeddings=2**24)(folder)
    outcome = loader.load(folder)
    assert outcome.kind == "token", outcome


def test_a_model_that_no_memory_can_hold_is_refused_where_weights_are_invented(tmp_path: Path, loader: Loader) -> None:
    folder = directory(tmp_path)
    with_json(vocab_size=2**20, hidden_size=2**17, num_hidden_layers=1024, intermediate_size=2**20, head_dim=64)(folder)
    outcome = loader.load(folder, load_format="dummy")
    assert outcome.kind == "ModelError", outcome
    assert "GiB" in outcome.message


def test_symbolic_links_are_followed_as_the_hubs_cache_has_them(tmp_path: Path, loader: Loader) -> None:
    folder = directory(tmp_path)
    blob = (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(blob)
    assert loader.load(folder).kind == "token"
