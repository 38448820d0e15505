"""Models of strangers as directories: whatever they claim, they are refused by a sentence that names what is wrong, or
served.

Each trap is a small honest model with one lie in it. Each is sprung in a process that may take 1 GiB and 10 s.
"""

from __future__ import annotations

import base64
import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu.checkpoint.tokenizers import check_steps
from tests.gpu.foreign_files import Loader
from tests.gpu.lying_files import CONFIG, directory, tokenizer_json


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
WINDOW: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "sliding_window": 8}
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
        ["normalizer Replace", "65,536 characters", "limit 64"],
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
    "no numbers in a shape of too many": (
        with_header(lambda h: h.update(more={"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]})),
        ["'more'", "[0, 4611686018427387904]"],
    ),
    "a shape of true": (with_header(lambda h: h[NORM].update(shape=[True])), [NORM, "[True]"]),
    "weights of 8 bits": (with_header(lambda h: h[NORM].update(dtype="F8_E4M3")), [NORM, "F8_E4M3", "F64, F32, F16"]),
    "a tensor that is a list": (with_header(lambda h: h.update({NORM: []})), [NORM, "an array of 0"]),
    "a tensor twice": (
        with_header(lambda h: json.dumps(h)[:-1] + f', "{NORM}": {json.dumps(h[NORM])}}}'),
        ["occurs twice"],
    ),
    "a deep header": (with_header(lambda h: '{"a":' * 100_000), ["nested too deeply"]),
    "a missing tensor": (with_header(lambda h: h.update({"x": h.pop(NORM)})), ["'x'", "unknown"]),
    "an index of a file elsewhere": (
        with_json(INDEX, weight_map={NORM: "../../x.safetensors"}),
        ["to a file of the same folder"],
    ),
    "an index of an absolute path": (
        with_json(INDEX, weight_map={NORM: "/etc/passwd"}),
        ["to a file of the same folder"],
    ),
    "an index of a folder": (with_json(INDEX, weight_map={NORM: ".."}), ["to a file of the same folder"]),
    "an index of a very long name": (with_json(INDEX, weight_map={NORM: "x" * 5000}), ["to a file of the same folder"]),
    "an index with a null byte": (with_json(INDEX, weight_map={NORM: "a\0b"}), ["to a file of the same folder"]),
    "an index that is a list": (with_json(INDEX, weight_map=[1]), ["to a file of the same folder"]),
    "an index of a missing file": (with_json(INDEX, weight_map={NORM: "b.safetensors"}), ["lacks b.safetensors"]),
}


@pytest.mark.slow
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


def test_an_honest_directory_is_served_within_these_limits(tmp_path: Path, loader: Loader) -> None:
    """Or every trap above would be refused for the wrong reason."""
    assert loader.load(directory(tmp_path)).kind == "token"


def test_a_context_of_16_million_takes_memory_for_what_is_served(tmp_path: Path, loader: Loader) -> None:
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
