"""What a GGUF file's metadata says about the model's shape."""

from __future__ import annotations

import math

import numpy as np

from gpu.checkpoint.architecture import Architecture
from gpu.checkpoint.config import ModelConfig, RopeScaling
from gpu.checkpoint.errors import ModelError
from gpu.checkpoint.families import FAMILIES
from gpu.checkpoint.families.llama import LLAMA
from gpu.checkpoint.families.mixtral import MIXTRAL
from gpu.checkpoint.gguf_file import GGUFFile
from gpu.checkpoint.header_fields import FIELDS, HeaderField, Numbers, check_field, shown
from gpu.checkpoint.hf_config import check_config, linear_or_yarn

GGUF_FAMILIES = {family.gguf: family for family in FAMILIES.values() if family.gguf is not None}

_ROPE_FREQUENCIES = "rope_freqs.weight"
_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The configuration of the model in `file`. Raises `ModelError` if it is incomplete or cannot be run."""
    architecture = file.require("general.architecture", str)
    if architecture not in GGUF_FAMILIES:
        raise ModelError(
            f"{file.path.name} holds a model of architecture {shown(architecture)}; supported in GGUF files are "
            f"{', '.join(GGUF_FAMILIES)}."
        )
    if file.get("split.count", int, 1) != 1:
        raise ModelError(f"{file.path.name} is one of several parts. Join them with `llama-gguf-split --merge` first.")
    family = GGUF_FAMILIES[architecture]
    has_experts = any(field.gguf == "expert_count" for field in family.numbers.values())
    if not has_experts and file.get(f"{architecture}.expert_count", int, 0) != 0:
        if architecture != LLAMA.gguf:
            raise ModelError(f"{file.path.name} holds a mixture of experts of {architecture}, which is not supported.")
        family = MIXTRAL
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path.name} has no tensor token_embd.weight: it holds no language model.")

    def find(_: str, field: HeaderField) -> tuple[object, str]:
        key = f"{architecture}.{field.gguf}"
        return file.metadata.get(key), f"metadata {key}"

    numbers = Numbers(find, source=file.path.name, own=family.numbers)
    sizes = numbers.sizes()
    head_dim, num_layers = sizes["head_dim"], sizes["num_hidden_layers"]
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.get(f"{architecture}.{key}", int, head_dim) != head_dim:
            raise ModelError(
                f"{file.path.name}: {architecture}.{key} other than the head's size {head_dim} is not supported."
            )

    rope_theta = numbers.number("rope_theta", 10000.0)
    has_window = file.get(f"{architecture}.attention.sliding_window", int, 0) != 0
    vocab_size = file.tensors["token_embd.weight"].shape[0]
    config = ModelConfig(
        **sizes,
        architecture=family.name,
        vocab_size=check_field(
            FIELDS["vocab_size"], vocab_size, key="the number of rows of token_embd.weight", source=file.path.name
        ),
        rms_norm_eps=_shortest(numbers.number("rms_norm_eps")),
        rope_theta=rope_theta,
        rope_scaling=_rope_scaling(file, numbers, rope_theta, head_dim, family),
        tie_word_embeddings="output.weight" not in file.tensors,
        torch_dtype="bfloat16",  # no file says it: its floats and quantized blocks were rounded from this, mostly
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sliding_window=numbers.integer("sliding_window") if has_window else None,
        layer_types=ModelConfig.alternating(num_layers, numbers.integer("sliding_window_pattern", family.full_layers))
        if has_window and family.full_layers
        else (),
        eos_token_ids=tuple(dict.fromkeys(token for key in _EOS_KEYS if (token := file.get(key, int)) is not None)),
        bos_token_id=file.get("tokenizer.ggml.bos_token_id", int),
        numbers=numbers.own(),
    )
    check_config(config, source=file.path.name)
    return config


def _shortest(value: float) -> float:
    """The shortest decimal of the same float32: 1e-05 where the file's float32 reads 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(
    file: GGUFFile, numbers: Numbers, rope_theta: float, head_dim: int, family: Architecture
) -> RopeScaling | None:
    if _ROPE_FREQUENCIES in file.tensors:
        return _llama3_scaling(file, rope_theta, head_dim)
    architecture = file.require("general.architecture", str)
    kind = file.get(f"{architecture}.rope.scaling.type", str, "none")
    if kind == "none":
        return None
    if kind in ("linear", "yarn"):
        return linear_or_yarn(kind, numbers, truncate=family.yarn_truncate)
    raise ModelError(
        f"{file.path.name}: RoPE scaling {shown(kind)} is not supported; supported are linear, yarn and Llama 3's."
    )


def _llama3_scaling(file: GGUFFile, rope_theta: float, head_dim: int) -> RopeScaling:
    """Recover Llama 3's scaling from the divisors of the frequencies, which is all that the converter writes down.

    All Llama 3.x share everything but the largest divisor. That the file's divisors are theirs is checked, one by one.
    """
    if file.tensors[_ROPE_FREQUENCIES].shape == (head_dim // 2,):
        divisors = file.read(_ROPE_FREQUENCIES)
        factor = check_field(
            FIELDS["factor"], float(divisors.max()), key=f"the largest of {_ROPE_FREQUENCIES}", source=file.path.name
        )
        scaling = RopeScaling(rope_type="llama3", factor=factor)
        if np.allclose(divisors, _llama3_divisors(scaling, rope_theta, head_dim), rtol=1e-4):
            return scaling
    raise ModelError(
        f"{file.path.name}: {_ROPE_FREQUENCIES} is not Llama 3's RoPE scaling, the only one that is supported."
    )


def _llama3_divisors(scaling: RopeScaling, rope_theta: float, head_dim: int) -> list[float]:
    """What Llama 3 divides each of the head_dim / 2 inverse frequencies by.

    Long wavelengths are divided by `factor`, short ones by 1, and in between the inverse of the divisor goes linearly
    with original context / wavelength (Llama 3.1's reference code, `apply_scaling`).
    """
    divisors = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * rope_theta ** (2 * index / head_dim)
        turns = scaling.original_max_position_embeddings / wavelength
        smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = min(max(smooth, 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return divisors
