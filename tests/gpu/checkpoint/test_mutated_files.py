"""Honest model files with a few random faults: each is served, or refused in words of our own, within bounds.

A failure names its seed. `mutated_gguf(seed)` and `mutated_directory(seed)` make the same file again.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.foreign_files import Loader
from tests.gpu.lying_files import WEIGHTS, directory, put, tiny_gguf

SHORT = 24  # files of each kind
STORM_SECONDS = 300.0

INTEGERS = [0, 1, 2, 3, 7, 15, 16, 31, 63, 64, 255, 256, 272, 1000, 4096, 65535, 65536, 2**20, 2**24, 2**24 + 1]
INTEGERS += [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**60, 2**63 - 1, 2**63, 2**64 - 1]
SIGNED = [*INTEGERS, *(-number for number in INTEGERS)]
FLOATS = [
    0.0,
    -0.0,
    1e-45,
    1e-12,
    1e-5,
    0.1,
    0.5,
    1.0,
    1e4,
    1e12,
    3e38,
    -1.0,
    float("inf"),
    float("-inf"),
    float("nan"),
]
TEXTS = ["", "a", "\0", "é", "🙂", "x" * 1000, "../x", "/etc/passwd", "linear", "llama3", "Ġ", "a b", "\ufffd"]
VALUES: list[Any] = [
    *SIGNED,
    *FLOATS,
    *TEXTS,
    None,
    True,
    False,
    [],
    {},
    [[]],
    [1, "a", None],
    {"a": 1},
    10**40,
    [0] * 500,
]
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def ggufs(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Unquantized, and of 8 and 4 bits."""
    folder, files = tmp_path_factory.mktemp("honest"), []
    for kind in ("F32", "Q8_0", "Q4_1"):
        model = tiny_gguf(folder / f"{kind}.gguf").add_weights(WEIGHTS, kind)
        put(model, "tokenizer.chat_template", TEMPLATE)
        put(model, "general.description", "Nobody minds what stands here. " * 60)
        put(model, "llama.attention.sliding_window", 64)
        put(model, "llama.rope.scaling.type", "linear")
        put(model, "llama.rope.scaling.factor", 2.0)
        files.append(model.save().read_bytes())
    return files


@pytest.fixture(scope="module")
def honest_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = directory(tmp_path_factory.mktemp("honest"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "tie_word_embeddings": False, "head_dim": 16}
    config |= {"architectures": ["MistralForCausalLM"], "sliding_window": 64, "layer_types": ["sliding_attention"] * 2}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "bos_token_id": 1}))
    special = {"eos_token": "a", "bos_token": {"content": "b"}, "chat_template": TEMPLATE}
    special["added_tokens_decoder"] = {"2": {"content": "a", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = {"id": 260, "content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False}
    tokenizer["added_tokens"] = [added | {"normalized": False, "special": True}]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = json.loads(_split(folder / "model.safetensors")[0])
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def mutated_gguf(seed: int, files: list[bytes]) -> bytes:
    chance = random.Random(seed)
    data = bytearray(chance.choice(files))
    end = data.rindex(b"ffn_down") + 64  # the names of tensors are the end of the header
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        at = chance.randrange(4, end)
        what = chance.random()
        if what < 0.5:
            _overwrite(data, _after_a_key(chance, data) if what < 0.35 else at, chance)
        elif what < 0.7:
            data[at] = chance.randrange(256)
        elif what < 0.8:
            data[at] ^= 1 << chance.randrange(8)
        elif what < 0.85:
            del data[chance.randrange(4, len(data)) :]
            return bytes(data)
        else:
            _splice(data, at, chance, end)
    return bytes(data)


def _after_a_key(chance: random.Random, data: bytearray) -> int:
    """Where the value of some metadata key, or the shape, type and offset of some tensor, lies."""
    key = chance.choice([b"llama.", b"general.", b"tokenizer.", b"blk.", b"token_embd.", b"output"])
    places = _places(data, key)
    if not places:
        return chance.randrange(4, len(data) - 8)
    place = chance.choice(places)
    (length,) = struct.unpack_from("<Q", data, place - 8)
    return min(place + min(length, 64) + chance.choice([0, 4, 4, 4, 8, 12, 16, 20, 24]), len(data) - 8)


def _places(data: bytearray, key: bytes) -> list[int]:
    places: list[int] = []
    place = data.find(key, 24)
    while place >= 0 and len(places) < 100:
        places.append(place)
        place = data.find(key, place + 1)
    return places


def _overwrite(data: bytearray, at: int, chance: random.Random) -> None:
    code = chance.choice("BHIIIQQf")
    if code == "f":
        value = struct.pack("<f", chance.choice(FLOATS))
    else:
        size = struct.calcsize(f"<{code}")
        value = (chance.choice(SIGNED) % 2 ** (8 * size)).to_bytes(size, "little")
    data[at : at + len(value)] = value


def _splice(data: bytearray, at: int, chance: random.Random, end: int) -> None:
    """Take bytes out, say them twice, or change them for others of the header."""
    size = chance.choice([1, 4, 8, 24, 100])
    other = chance.randrange(4, end)
    what = chance.randrange(3)
    if what == 0:
        del data[at : at + size]
    elif what == 1:
        data[at:at] = data[other : other + size]
    else:
        data[at : at + size], data[other : other + size] = data[other : other + size], data[at : at + size]


def mutated_directory(seed: int, honest: Path, folder: Path) -> Path:
    chance = random.Random(seed)
    shutil.copytree(honest, folder)
    for _ in range(chance.choice([1, 1, 2, 3])):
        path = chance.choice([folder / "config.json", *sorted(folder.iterdir())])
        data = path.read_bytes()
        if path.suffix == ".json" and chance.random() < 0.85:
            try:
                tree = json.loads(data)
            except ValueError:
                continue
            _change_tree(tree, chance)
            path.write_text(json.dumps(tree))
        elif path.suffix == ".safetensors" and len(data) > 8 and chance.random() < 0.85:
            path.write_bytes(_changed_header(path, chance))
        elif data:
            path.write_bytes(_changed_bytes(data, chance))
    return folder


def _change_tree(tree: Any, chance: random.Random) -> None:
    """Replace, drop or repeat something in a JSON value, mostly near its root."""
    while isinstance(tree, dict | list) and tree:
        key = chance.choice(list(tree)) if isinstance(tree, dict) else chance.randrange(len(tree))
        if isinstance(tree[key], dict | list) and tree[key] and chance.random() < 0.8:
            tree = tree[key]
            continue
        what = chance.random()
        if what < 0.75:
            tree[key] = chance.choice(VALUES)
        elif what < 0.85:
            del tree[key]
        elif isinstance(tree, list):
            tree.insert(chance.randrange(len(tree) + 1), tree[key])
        else:
            tree[chance.choice([*TEXTS, *tree])] = tree[key]
        return


def _split(path: Path) -> tuple[bytes, bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    return data[8 : 8 + length], data[8 + length :]


def _changed_header(path: Path, chance: random.Random) -> bytes:
    header, data = _split(path)
    try:
        tree = json.loads(header)
    except ValueError:
        return _changed_bytes(header + data, chance)
    _change_tree(tree, chance)
    header = json.dumps(tree).encode()
    length = len(header) if chance.random() < 0.9 else chance.choice(INTEGERS)
    return struct.pack("<Q", length) + header + data


def _changed_bytes(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    at = chance.randrange(min(len(changed), 4000))
    if chance.random() < 0.3:
        del changed[at:]
    else:
        changed[at] = chance.randrange(256)
    return bytes(changed)


def check(loader: Loader, path: Path, seed: int) -> str:
    outcome = loader.load(path)
    assert outcome.is_allowed, f"seed {seed}: {outcome}"
    return outcome.kind


def run(check_one: Callable[[int], str], seeds: Iterator[int]) -> None:
    kinds = [check_one(seed) for seed in seeds]
    assert "ModelError" in kinds, "no fault was found"
    assert "token" in kinds, "no file was served"


def until(deadline: float, first: int) -> Iterator[int]:
    seed = first
    while time.monotonic() < deadline:
        yield seed
        seed += 1


def gguf_check(loader: Loader, files: list[bytes], folder: Path) -> Callable[[int], str]:
    def check_one(seed: int) -> str:
        path = folder / "m.gguf"
        path.write_bytes(mutated_gguf(seed, files))
        return check(loader, path, seed)

    return check_one


def directory_check(loader: Loader, honest: Path, folder: Path) -> Callable[[int], str]:
    def check_one(seed: int) -> str:
        path = mutated_directory(seed, honest, folder / "model")
        try:
            return check(loader, path, seed)
        finally:
            shutil.rmtree(path)

    return check_one


def test_a_gguf_file_with_faults_is_served_or_refused(loader: Loader, ggufs: list[bytes], tmp_path: Path) -> None:
    run(gguf_check(loader, ggufs, tmp_path), iter(range(SHORT)))


@pytest.mark.slow
def test_a_directory_with_faults_is_served_or_refused(loader: Loader, honest_directory: Path, tmp_path: Path) -> None:
    run(directory_check(loader, honest_directory, tmp_path), iter(range(SHORT)))


@pytest.mark.storm
def test_many_gguf_files_with_faults(loader: Loader, ggufs: list[bytes], tmp_path: Path) -> None:
    seeds = until(time.monotonic() + STORM_SECONDS, random.SystemRandom().randrange(2**40))
    run(gguf_check(loader, ggufs, tmp_path), seeds)


@pytest.mark.storm
def test_many_directories_with_faults(loader: Loader, honest_directory: Path, tmp_path: Path) -> None:
    seeds = until(time.monotonic() + STORM_SECONDS, random.SystemRandom().randrange(2**40))
    run(directory_check(loader, honest_directory, tmp_path), seeds)
