"""The shape of a model, whatever kind of file it came from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency scaling (`rope_type: llama3`), linear position interpolation (`linear`), or `yarn`."""

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0  # of YaRN, as are those below: turns in the original context
    beta_slow: float = 1.0
    truncate: bool = True  # whether the bounds are whole dimensions
    attention_factor: float = 1.0  # cosines and sines are multiplied by it


def yarn_attention_factor(factor: float) -> float:
    """What YaRN recommends for contexts `factor` times as long (Peng et al., arXiv:2309.00071, 3.4)."""
    return 0.1 * math.log(max(factor, 1.0)) + 1.0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer. Field names are those of a Hugging Face `config.json`."""

    architecture: str  # a key of `gpu.checkpoint.families.FAMILIES`
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # biases on q, k and v (Qwen2)
    qk_norm: bool = False  # RMSNorm on each query and key head (Qwen3)
    sliding_window: int | None = None  # of the layers that slide (`window`); None: none does
    layer_types: tuple[str, ...] = ()  # "full_attention" or "sliding_attention" for each layer; (): all alike
    dense_layers: tuple[int, ...] = ()  # of a family with experts: those that have a feed-forward network instead
    torch_dtype: str = "float32"  # what the checkpoint was saved in: "float32", "float16" or "bfloat16"
    eos_token_ids: tuple[int, ...] = field(default=())
    bos_token_id: int | None = None
    numbers: Mapping[str, int | float] = field(default_factory=dict, hash=False)  # those that only its family has

    @property
    def num_experts(self) -> int:
        """Of a layer; 0: there are none."""
        return int(self.numbers.get("num_experts", 0))

    def window(self, layer: int) -> int | None:
        """How many tokens a query of this layer sees, itself included; None: all before it."""
        is_full = bool(self.layer_types) and self.layer_types[layer] == "full_attention"
        return None if is_full else self.sliding_window

    @staticmethod
    def alternating(num_layers: int, every: int) -> tuple[str, ...]:
        """The `layer_types` of which every so many-th is full."""
        return tuple(f"{'sliding' if (index + 1) % every else 'full'}_attention" for index in range(num_layers))
