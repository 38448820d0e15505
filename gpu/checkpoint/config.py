"""The model's configuration, whatever kind of file it comes from, and checks of its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import HeadraceError


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency scaling (`rope_type: llama3`), linear position interpolation (`linear`), `yarn`, or
    `longrope`, with frequency divisors for contexts up to the original length and others for longer contexts."""

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0  # YaRN, like the fields below: turns in the original context
    beta_slow: float = 1.0
    truncate: bool = True  # round the bounds to whole dimensions
    attention_factor: float = 1.0  # cosines and sines are multiplied by it
    short_factors: tuple[float, ...] = ()  # longrope, like `long_factors`: a divisor for each rotating pair
    long_factors: tuple[float, ...] = ()
    mscale_all_dim: float = 0.0  # DeepSeek's scores are multiplied by the square of this attention factor
    query_beta: float = 0.0  # queries are multiplied by 1 + beta ln(1 + floor(position / original context)); 0: by 1

    def is_long(self, max_model_len: int) -> bool:
        """Return True if a server with this `max_model_len` uses `long_factors`. It then uses them in short contexts
        too: otherwise cached blocks of a short context would be wrong in a long one."""
        return bool(self.long_factors) and max_model_len > self.original_max_position_embeddings


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """Return YaRN's attention factor for contexts `factor` times as long as the original (Peng et al.,
    arXiv:2309.00071, 3.4); with both `mscale` values, DeepSeek's quotient of two such factors."""
    log = math.log(max(factor, 1.0))
    if mscale and mscale_all_dim:
        return (0.1 * mscale * log + 1.0) / (0.1 * mscale_all_dim * log + 1.0)
    return 0.1 * log + 1.0


def longrope_attention_factor(factor: float, original: int) -> float:
    """Return longrope's attention factor for contexts `factor` times as long as the original (Ding et al.,
    arXiv:2402.13753)."""
    return math.sqrt(1.0 + math.log(factor) / math.log(max(original, 2))) if factor > 1.0 else 1.0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer, or an encoder. Field names are those of a Hugging Face `config.json`."""

    architecture: str  # a key of `gpu.checkpoint.families.table.FAMILIES`
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
    rotary_dim: int | None = None  # dimensions of a head that rotate; None: all
    layers_without_rope: tuple[int, ...] = ()  # layers without positions
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # biases on q, k and v (Qwen2)
    qk_norm: bool = False  # RMSNorm on each query and key head (Qwen3)
    sliding_window: int | None = None  # window of the sliding layers (see `window`); None: no layer slides
    layer_types: tuple[str, ...] = ()  # full_, sliding_ or linear_attention for each layer; (): all alike
    dense_layers: tuple[int, ...] = ()  # in families with experts: layers with a feed-forward network instead
    torch_dtype: str = "float32"  # type of the checkpoint's weights: "float32", "float16" or "bfloat16"
    eos_token_ids: tuple[int, ...] = field(default=())
    bos_token_id: int | None = None
    numbers: Mapping[str, int | float] = field(default_factory=dict, hash=False)  # fields that only this family has
    encoder: Any = None  # the `encoder.EncoderSpec` of an encoder; None: a decoder
    transformers_dir: str | None = None  # the folder of a model that transformers computes; None: Headrace does

    @property
    def num_experts(self) -> int:
        """The experts of a layer; 0 without a mixture of experts."""
        return int(self.numbers.get("num_experts", 0))

    @property
    def embedding_size(self) -> int:
        """The length of a vector of `/v1/embeddings`."""
        dense = () if self.encoder is None else self.encoder.dense
        return int(dense[-1].weight.shape[0]) if dense else self.hidden_size

    def window(self, layer: int) -> int | None:
        """Return the number of tokens that a query of this layer sees, itself included; None: all before it."""
        is_full = bool(self.layer_types) and self.layer_types[layer] == "full_attention"
        return None if is_full else self.sliding_window

    def has_keys(self, layer: int) -> bool:
        """Return True if this layer keeps keys and values; others have a state (`StateSpec`)."""
        return not self.layer_types or self.layer_types[layer] != "linear_attention"

    def source(self, layer: int) -> int:
        """Return the layer with the keys and values that this layer reads: itself, or for each of the last
        `num_kv_shared_layers` the last layer before them with the same window."""
        own = self.num_hidden_layers - int(self.numbers.get("num_kv_shared_layers", 0))
        if layer < own:
            return layer
        return max(other for other in range(own) if self.window(other) == self.window(layer))

    def kv_heads(self, layer: int) -> tuple[int, int]:
        """Return the number of KV heads of a layer, and their size; layers without a window may have their own."""
        if self.window(layer) is None and "global_head_dim" in self.numbers:
            return int(self.numbers["num_global_key_value_heads"]), int(self.numbers["global_head_dim"])
        return self.num_key_value_heads, self.head_dim

    @staticmethod
    def alternating(num_layers: int, every: int) -> tuple[str, ...]:
        """Return `layer_types` in which every `every`-th layer is full."""
        return tuple(f"{'sliding' if (index + 1) % every else 'full'}_attention" for index in range(num_layers))


def every_nth(count: int, interval: int) -> tuple[int, ...]:
    """Return every `interval`-th of `count` layers; none if `interval` is 0."""
    return tuple(index for index in range(count) if interval and (index + 1) % interval == 0)


# -------------------------------------------------------------------------------------------------------- header fields
# The bounds of the numbers in a model's header: one table for GGUF's metadata and config.json.
#
# A header comes from an unknown source, and its numbers decide how much memory is allocated and what the library of
# `gpu.cpu` computes with. So each number is checked before it is used. The bounds are well above any known model, and
# well within the code's limits: sizes fit 32 bits, products of two fit 64, and positions are distinct in float32, in
# which the angles of RoPE are computed.


Number = int | float
Kind = type[bool] | type[int] | type[float]


@dataclass(frozen=True, slots=True)
class HeaderField:
    """The kind and the bounds of a number or a flag of config.json."""

    kind: Kind
    low: Number
    high: Number  # bounds are inclusive
    unit: str
    gguf: str | None = None  # GGUF's key, without the architecture prefix
    default: Number | None = None  # for fields of one family; None: the field is required
    null: Number | None = None  # the value that null in config.json means; None: null is refused


FIELDS: dict[str, HeaderField] = {
    "vocab_size": HeaderField(int, 1, 2**20, "tokens"),
    "hidden_size": HeaderField(int, 1, 2**17, "elements", "embedding_length"),
    "intermediate_size": HeaderField(int, 1, 2**20, "elements", "feed_forward_length"),
    "num_hidden_layers": HeaderField(int, 1, 2**10, "layers", "block_count"),
    "num_attention_heads": HeaderField(int, 1, 2**11, "heads", "attention.head_count"),
    "num_key_value_heads": HeaderField(int, 1, 2**11, "heads", "attention.head_count_kv"),
    "head_dim": HeaderField(int, 2, 2**10, "elements", "attention.key_length"),
    "max_position_embeddings": HeaderField(int, 1, 2**24, "tokens", "context_length"),
    "sliding_window": HeaderField(int, 1, 2**24, "tokens", "attention.sliding_window"),
    "sliding_window_pattern": HeaderField(int, 1, 2**10, "layers", "attention.sliding_window_pattern"),
    "full_attention_interval": HeaderField(int, 1, 2**10, "layers", "full_attention_interval"),
    "decoder_sparse_step": HeaderField(int, 1, 2**10, "layers"),
    "max_window_layers": HeaderField(int, 0, 2**20, "layers"),
    "rms_norm_eps": HeaderField(float, 1e-12, 0.1, "", "attention.layer_norm_rms_epsilon"),
    "rope_theta": HeaderField(float, 1.0, 1e12, "", "rope.freq_base"),
    "factor": HeaderField(float, 0.01, 1e4, "times", "rope.scaling.factor"),
    "beta_fast": HeaderField(float, 1e-3, 1e4, "turns", "rope.scaling.yarn_beta_fast"),
    "beta_slow": HeaderField(float, 1e-3, 1e4, "turns", "rope.scaling.yarn_beta_slow"),
    "attention_factor": HeaderField(float, 0.01, 100.0, "times"),
    "longrope_attention_factor": HeaderField(float, 0.01, 100.0, "times", "rope.scaling.attn_factor"),
    "mscale": HeaderField(float, 0.0, 100.0, "times"),
    "mscale_all_dim": HeaderField(float, 0.0, 100.0, "times", "rope.scaling.yarn_log_multiplier"),
    "llama_4_scaling_beta": HeaderField(float, 0.0, 100.0, "", "attention.temperature_scale"),
    "partial_rotary_factor": HeaderField(float, 0.0, 1.0, "of a head"),
    "no_rope_layer_interval": HeaderField(int, 1, 2**10, "layers"),
    "low_freq_factor": HeaderField(float, 1e-3, 1e4, "turns"),
    "high_freq_factor": HeaderField(float, 1e-3, 1e4, "turns"),
    "original_max_position_embeddings": HeaderField(int, 1, 2**24, "tokens", "rope.scaling.original_context_length"),
}

FLAG = HeaderField(bool, 0, 1, "")
EXPERTS = HeaderField(int, 1, 2**10, "experts", "expert_count")
MAX_EXPERTS = 2**16  # experts of all layers; the largest known model has half as many
EXPERTS_PER_TOKEN = HeaderField(int, 1, 64, "experts", "expert_used_count")

MAX_CHAT_TEMPLATE = 2**20  # characters; the longest known templates have some 20,000


def check_field(field: HeaderField, value: Any, *, key: str, source: str) -> Any:
    """Return `value` as `field.kind`. Raises `ModelError` with `source`, `key`, value and bounds if it is not allowed.
    Infinity and NaN are never allowed."""
    if field.kind is bool:
        if not isinstance(value, bool):
            raise ModelError(f"{source}: {key} must be true or false, got {shown(value)}.")
        return value
    is_kind = isinstance(value, int | field.kind) and not isinstance(value, bool)
    if is_kind and field.low <= value <= field.high:
        return field.kind(value)
    low, high = (f"{bound:,}" if isinstance(bound, int) else f"{bound:g}" for bound in (field.low, field.high))
    allowed = f"{'an integer' if field.kind is int else 'a number'} from {low} to {high} {field.unit}".rstrip()
    raise ModelError(f"{source}: {key} must be {allowed}, got {shown(value)}.")


class Numbers:
    """The numbers of one header, by their names in `FIELDS` or in the family's table.

    `find` returns the value of a field, or None, and the name of its key for errors. Reading a number raises
    `ModelError` if it is out of bounds, of another type, or absent without a default.
    """

    def __init__(
        self,
        find: Callable[[str, HeaderField], tuple[object, str]],
        *,
        source: str,
        own: Mapping[str, HeaderField] | None = None,
    ) -> None:
        self._find = find
        self._source = source
        self._own = own or {}

    def integer(self, name: str, default: int | None = None) -> int:
        return self._read(name, FIELDS[name], default)

    def number(self, name: str, default: float | None = None) -> float:
        return self._read(name, FIELDS[name], default)

    def sizes(self) -> dict[str, Any]:
        """Return the numbers that every header has, by their names in `ModelConfig`."""
        hidden_size, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        return {
            "hidden_size": hidden_size,
            "intermediate_size": self.integer("intermediate_size"),
            "num_hidden_layers": self.integer("num_hidden_layers"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.integer("num_key_value_heads", heads),
            "head_dim": self.integer("head_dim", hidden_size // heads),
            "max_position_embeddings": self.integer("max_position_embeddings"),
        }

    def own(self) -> dict[str, int | float]:
        return {name: self._read(name, field, field.default) for name, field in self._own.items()}

    def _read(self, name: str, field: HeaderField, default: float | None) -> Any:
        value, key = self._find(name, field)
        return check_field(field, default if value is None else value, key=key, source=self._source)


def check_chat_template(value: object, *, key: str, source: str) -> str | None:
    """Return the chat template, or None. Raises `ModelError` if it is not a string or too long."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise ModelError(f"{source}: {key} must be a string, got {shown(value)}.")
    if len(value) > MAX_CHAT_TEMPLATE:
        raise ModelError(f"{source}: {key} has {len(value):,} characters; up to {MAX_CHAT_TEMPLATE:,} are allowed.")
    return value


def shown(value: object) -> str:
    """Return a short form of a value for an error message: long lists and numbers are described, not written out."""
    if isinstance(value, list | tuple | dict):
        return f"{'an object' if isinstance(value, dict) else 'an array'} of {len(value):,}"
    if isinstance(value, str):
        return repr(value[:60]) + ("..." if len(value) > 60 else "")
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"an integer of {value.bit_length():,} bits"
    return repr(value)


class ModelError(HeadraceError):
    """A model that cannot be found, read or run. The message is for the operator who chose the model: it may hold local
    paths, so it goes to the log and the terminal, never to a client."""
