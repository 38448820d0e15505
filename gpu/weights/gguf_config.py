"""What a GGUF file's metadata says about the model's shape. Torch-free."""

from __future__ import annotations

import math

import numpy as np

from gpu.config import ModelConfig, RopeScaling
from gpu.weights.errors import ModelError
from gpu.weights.gguf_file import GGUFFile
from gpu.weights.hf_config import check_config

# `general.architecture` to the Hugging Face name. Mistral's files call themselves llama.
GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The configuration of the model in `file`. Raises `ModelError` if it is incomplete or cannot be run."""
    architecture = file.require("general.architecture", str)
    if architecture not in GGUF_ARCHITECTURES:
        raise ModelError(
            f"{file.path.name} holds a model of architecture {architecture!r}; supported in GGUF files are "
            f"{', '.join(GGUF_ARCHITECTURES)}."
        )
    if file.get("split.count", int, 1) != 1:
        raise ModelError(f"{file.path.name} is one of several parts. Join them with `llama-gguf-split --merge` first.")
    if file.get(f"{architecture}.expert_count", int, 0):
        raise ModelError(f"{file.path.name} holds a mixture of experts, which is not supported; serve a dense model.")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path.name} has no tensor token_embd.weight: it holds no language model.")

    hidden_size = file.require(f"{architecture}.embedding_length", int)
    heads = file.require(f"{architecture}.attention.head_count", int)
    if heads <= 0:
        raise ModelError(
            f"{file.path.name}: metadata {architecture}.attention.head_count must be positive, got {heads}."
        )
    head_dim = file.get(f"{architecture}.attention.key_length", int) or hidden_size // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.get(f"{architecture}.{key}", int, head_dim) != head_dim:
            raise ModelError(
                f"{file.path.name}: {architecture}.{key} other than the head's size {head_dim} is not supported."
            )

    rope_theta = file.get(f"{architecture}.rope.freq_base", float) or 10000.0
    config = ModelConfig(
        architecture=GGUF_ARCHITECTURES[architecture],
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=file.require(f"{architecture}.feed_forward_length", int),
        num_hidden_layers=file.require(f"{architecture}.block_count", int),
        num_attention_heads=heads,
        num_key_value_heads=file.get(f"{architecture}.attention.head_count_kv", int) or heads,
        head_dim=head_dim,
        max_position_embeddings=file.require(f"{architecture}.context_length", int),
        rms_norm_eps=_shortest(file.require(f"{architecture}.attention.layer_norm_rms_epsilon", float)),
        rope_theta=rope_theta,
        rope_scaling=_rope_scaling(file, architecture, rope_theta, head_dim),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sliding_window=file.get(f"{architecture}.attention.sliding_window", int) or None,
        eos_token_ids=tuple(dict.fromkeys(token for key in _EOS_KEYS if (token := file.get(key, int)) is not None)),
        bos_token_id=file.get("tokenizer.ggml.bos_token_id", int),
    )
    check_config(config, source=file.path.name)
    return config


def _shortest(value: float) -> float:
    """The shortest decimal of the same float32: 1e-05 where the file's float32 reads 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(file: GGUFFile, architecture: str, rope_theta: float, head_dim: int) -> RopeScaling | None:
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, rope_theta, head_dim)
    kind = file.get(f"{architecture}.rope.scaling.type", str, "none")
    if kind == "none":
        return None
    if kind == "linear":
        return RopeScaling(rope_type="linear", factor=file.require(f"{architecture}.rope.scaling.factor", float))
    raise ModelError(f"{file.path.name}: RoPE scaling {kind!r} is not supported; supported are linear and Llama 3's.")


def _llama3_scaling(file: GGUFFile, rope_theta: float, head_dim: int) -> RopeScaling:
    """Recover Llama 3's scaling from the divisors of the frequencies, which is all that the converter writes down.

    All Llama 3.x share everything but the largest divisor. That the file's divisors are theirs is checked, one by one.
    """
    divisors = file.read("rope_freqs.weight")
    scaling = RopeScaling(rope_type="llama3", factor=float(divisors.max()))
    if divisors.shape != (head_dim // 2,) or not np.allclose(
        divisors, _llama3_divisors(scaling, rope_theta, head_dim), rtol=1e-4
    ):
        raise ModelError(
            f"{file.path.name}: rope_freqs.weight is not Llama 3's RoPE scaling, the only one that is supported."
        )
    return scaling


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
