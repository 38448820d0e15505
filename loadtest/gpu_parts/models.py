"""Shapes of published models from 0.6 to 8 billion parameters, as their config.json files say them.

Enough for a benchmark, which fills them with random weights: a step takes as long whatever the weights are.
"""

from __future__ import annotations

from typing import Any

from gpu.checkpoint import ModelConfig
from gpu.checkpoint.hf_config import config_from_hf

_LLAMA_3 = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_QWEN_2 = _QWEN | {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768}
_QWEN_3 = _QWEN | {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
_MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _size(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, tied: bool = False) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
    }


PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": _LLAMA_3
    | _size(4096, 14336, 32, 32, 8)
    | {"head_dim": 128, "rope_scaling": _LLAMA_3_ROPE | {"factor": 8.0}},
    "Llama-3.2-3B": _LLAMA_3
    | _size(3072, 8192, 28, 24, 8, tied=True)
    | {"head_dim": 128, "rope_scaling": _LLAMA_3_ROPE | {"factor": 32.0}},
    "Llama-3.2-1B": _LLAMA_3
    | _size(2048, 8192, 16, 32, 8, tied=True)
    | {"head_dim": 64, "rope_scaling": _LLAMA_3_ROPE | {"factor": 32.0}},
    "Qwen3-8B": _QWEN_3 | _size(4096, 12288, 36, 32, 8),
    "Qwen3-4B": _QWEN_3 | _size(2560, 9728, 36, 32, 8, tied=True),
    "Qwen3-0.6B": _QWEN_3 | _size(1024, 3072, 28, 16, 8, tied=True),
    "Qwen2.5-7B": _QWEN_2 | _size(3584, 18944, 28, 28, 4) | {"vocab_size": 152064},
    "Qwen2.5-1.5B": _QWEN_2 | _size(1536, 8960, 28, 12, 2, tied=True) | {"vocab_size": 151936},
    "Mistral-7B-v0.3": _MISTRAL
    | _size(4096, 14336, 32, 32, 8)
    | {"vocab_size": 32768, "rope_theta": 1000000.0, "sliding_window": None},
    "Mistral-7B-v0.1": _MISTRAL
    | _size(4096, 14336, 32, 32, 8)
    | {"vocab_size": 32000, "rope_theta": 10000.0, "sliding_window": 4096},
}

# A model that a CPU steps in milliseconds, to try the control flow with.
TINY = (
    _QWEN_3
    | _size(64, 96, 2, 4, 2, tied=True)
    | {"vocab_size": 512, "head_dim": 16, "max_position_embeddings": 512, "bos_token_id": 510, "eos_token_id": 511}
)


def load_shape(name: str) -> ModelConfig:
    """The configuration of a published model, or of "tiny"."""
    return config_from_hf(TINY if name == "tiny" else PUBLISHED[name], source=name)


def kv_bytes_per_token(config: ModelConfig, element_size: int) -> int:
    """Bytes of KV cache that one token takes over all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * element_size
