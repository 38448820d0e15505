"""What the numbers of a model's header may be: one table for GGUF's metadata and config.json.

A header is written by a stranger, and what it claims decides how much memory is taken and what the library of
`gpu.cpu` computes with. So each number passes this table before anything is made of it. The bounds lie well beyond any
model there is, and well within what the code can hold: sizes fit 32 bits, products of two fit 64, and positions are
told apart in float32, where the angles of RoPE are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpu.checkpoint.errors import ModelError

Number = int | float
Kind = type[bool] | type[int] | type[float]


@dataclass(frozen=True, slots=True)
class HeaderField:
    """A number, or a flag, by its name in config.json, and what it may be."""

    kind: Kind
    low: Number
    high: Number  # itself allowed, as is `low`
    unit: str
    gguf: str | None = None  # GGUF's key, without the architecture before it
    default: Number | None = None  # of a number that only its family has; None: it must be there
    null: Number | None = None  # the value of null in config.json; None: null is refused like a wrong type


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
    "decoder_sparse_step": HeaderField(int, 1, 2**10, "layers"),
    "max_window_layers": HeaderField(int, 0, 2**20, "layers"),
    "rms_norm_eps": HeaderField(float, 1e-12, 0.1, "", "attention.layer_norm_rms_epsilon"),
    "rope_theta": HeaderField(float, 1.0, 1e12, "", "rope.freq_base"),
    "factor": HeaderField(float, 0.01, 1e4, "times", "rope.scaling.factor"),
    "beta_fast": HeaderField(float, 1e-3, 1e4, "turns", "rope.scaling.yarn_beta_fast"),
    "beta_slow": HeaderField(float, 1e-3, 1e4, "turns", "rope.scaling.yarn_beta_slow"),
    "attention_factor": HeaderField(float, 0.01, 100.0, "times"),
    "low_freq_factor": HeaderField(float, 1e-3, 1e4, "turns"),
    "high_freq_factor": HeaderField(float, 1e-3, 1e4, "turns"),
    "original_max_position_embeddings": HeaderField(int, 1, 2**24, "tokens", "rope.scaling.original_context_length"),
}

FLAG = HeaderField(bool, 0, 1, "")
EXPERTS = HeaderField(int, 1, 2**10, "experts", "expert_count")
MAX_EXPERTS = 2**16  # of all layers; the model with most has half as many
EXPERTS_PER_TOKEN = HeaderField(int, 1, 64, "experts", "expert_used_count")

MAX_CHAT_TEMPLATE = 2**20  # characters; the longest there are have some 20,000


def check_field(field: HeaderField, value: Any, *, key: str, source: str) -> Any:
    """`value` as `field.kind` if the field may be it. Raises `ModelError` that names `source`, `key`, value and bounds.

    Infinity and NaN are never allowed.
    """
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
    """The numbers of one header, by their names in the table, or in that of its family.

    `find` gives the value of a field, or None, and what its key is called in an error. Reading one raises `ModelError`
    if it is out of bounds, of another type, or absent without a default.
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
        """Those that every header has, as `ModelConfig` has them."""
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
        """All those that only the family has."""
        return {name: self._read(name, field, field.default) for name, field in self._own.items()}

    def _read(self, name: str, field: HeaderField, default: float | None) -> Any:
        value, key = self._find(name, field)
        return check_field(field, default if value is None else value, key=key, source=self._source)


def check_chat_template(value: object, *, key: str, source: str) -> str | None:
    """Jinja source of a bearable length, or None where there is none. Raises `ModelError`."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise ModelError(f"{source}: {key} must be a text, got {shown(value)}.")
    if len(value) > MAX_CHAT_TEMPLATE:
        raise ModelError(f"{source}: {key} has {len(value):,} characters; up to {MAX_CHAT_TEMPLATE:,} are allowed.")
    return value


def shown(value: object) -> str:
    """A foreign value for an error: short, whatever it is. Neither a long list nor a long number is written out."""
    if isinstance(value, list | tuple | dict):
        return f"{'an object' if isinstance(value, dict) else 'an array'} of {len(value):,}"
    if isinstance(value, str):
        return repr(value[:60]) + ("..." if len(value) > 60 else "")
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"an integer of {value.bit_length():,} bits"
    return repr(value)
