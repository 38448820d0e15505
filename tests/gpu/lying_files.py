"""A small honest model in a GGUF file and in a directory, for tests to put a lie into."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file

from tests.gpu.checkpoint_files import ALPHABET, TINY, TinyGGUF, random_weights

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
