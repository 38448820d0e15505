"""One spelling of facts that a Hugging Face config.json may state in two places.

transformers 5 writes `rope_parameters` and `dtype` where older files have `rope_theta`, `rope_scaling` and
`torch_dtype`. Some files have both, for example where a person added YaRN by `rope_scaling`. Two spellings that
agree are read as one; two that contradict each other are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu.checkpoint.architecture import Architecture
from gpu.checkpoint.errors import ModelError
from gpu.checkpoint.header_fields import shown

FULL, SLIDING = "full_attention", "sliding_attention"


def one_spelling(values: Mapping[str, Any], family: Architecture, source: str) -> dict[str, Any]:
    """Return a copy of `values` that states each fact in one place, for `family`.

    Keys of `text_config` move to the top level. `num_experts`, `dtype`, `rope_theta`, `rope_local_base_freq` and
    `partial_rotary_factor` are at the top level, all other values of rotary embeddings in `rope_parameters`, which is
    flat and has a `rope_type`. Raises `ModelError` for spellings that contradict each other.
    """
    text = mapping(values, "text_config", source)
    _agreed(
        {
            "tie_word_embeddings": values.get("tie_word_embeddings"),
            "text_config.tie_word_embeddings": text.get("tie_word_embeddings"),
        },
        source,
    )
    merged = {**values, **text}
    for name, other in (("num_experts", "num_local_experts"), ("dtype", "torch_dtype")):
        value = _agreed({name: merged.get(name), other: merged.get(other)}, source)
        if value is not None:
            merged[name] = value
    return merged | _rope(merged, family, source)


def mapping(values: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    """Return the object `name`, empty if there is none. Raises `ModelError` for a value of another type."""
    value = values.get(name)
    if value is not None and not isinstance(value, dict):
        raise ModelError(f"{source}: {name} in config.json must be an object, got {shown(value)}.")
    return value or {}


def _rope(values: Mapping[str, Any], family: Architecture, source: str) -> dict[str, Any]:
    new, old = mapping(values, "rope_parameters", source), mapping(values, "rope_scaling", source)
    if not old and values.get("rope_parameters") is None:
        new = family.defaults.get("rope_parameters", {})
    found: dict[str, Any] = {}
    by_kind = "rope_local_base_freq" in family.numbers  # layers with a window have their own rotation
    if by_kind:
        new, found["rope_local_base_freq"] = _of_full_layers(values, new, source)
    elif kind := next((kind for kind in (FULL, SLIDING) if kind in new), None):
        raise ModelError(f"{source}: {kind} of rope_parameters in config.json is not supported for {family.name}.")
    if by_kind and old.get("type", "default") != "default" and old.get("rope_type") is None:
        raise ModelError(
            f"{source}: type={shown(old['type'])} of rope_scaling in config.json is not read by transformers for "
            f"{family.name}. Name it rope_type."
        )
    new, old = _with_type(new, "rope_parameters", source), old and _with_type(old, "rope_scaling", source)
    if old:  # transformers takes it in place of `rope_parameters`
        for name, value in new.items():
            if name != "rope_theta" and (name, value) != ("rope_type", "default") and old.get(name) != value:
                raise _contradiction(f"rope_parameters.{name}", value, f"rope_scaling.{name}", old.get(name), source)
        unseen, default = new.get("rope_theta"), family.defaults.get("rope_theta", 10000.0)
        named = not by_kind and old.get("rope_theta") is None and values.get("rope_theta") is None
        if named and unseen not in (None, default):
            raise ModelError(
                f"{source}: with rope_scaling in config.json, transformers ignores rope_theta={shown(unseen)} of "
                f"rope_parameters and takes {default:g}. Move the keys of rope_scaling to rope_parameters."
            )
    scaling = old or new
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        found[name] = _agreed(
            {
                name: values.get(name),
                f"rope_scaling.{name}": old.get(name),
                f"rope_parameters.{name}": new.get(name),
            },
            source,
        )
    found.pop("original_max_position_embeddings")
    return {name: value for name, value in found.items() if value is not None} | {"rope_parameters": scaling}


def _of_full_layers(
    values: Mapping[str, Any], rope: Mapping[str, Any], source: str
) -> tuple[Mapping[str, Any], float | None]:
    """Return the rotation of layers without a window, and the base of the other layers, None if it is not given."""
    if wrong := sorted(rope.keys() - {FULL, SLIDING}):
        raise ModelError(
            f"{source}: rope_parameters in config.json must hold {FULL} and {SLIDING}, got {shown(wrong[0])}."
        )
    local = mapping(rope, SLIDING, source)
    if _with_type(local, f"rope_parameters.{SLIDING}", source)["rope_type"] != "default":
        raise ModelError(f"{source}: RoPE scaling of layers with a window is not supported.")
    theta = _agreed(
        {
            "rope_local_base_freq": values.get("rope_local_base_freq"),
            f"rope_parameters.{SLIDING}.rope_theta": local.get("rope_theta"),
        },
        source,
    )
    return mapping(rope, FULL, source), theta


def _with_type(rope: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    """Return `rope` with its type under one name."""
    kind = _agreed({f"{name}.{key}": rope.get(key) for key in ("rope_type", "type")}, source)
    return {key: value for key, value in rope.items() if key != "type"} | {"rope_type": kind or "default"}


def _agreed(named: Mapping[str, Any], source: str) -> Any:
    """Return the common value of all names that have one, or None. Raises `ModelError` if two values differ."""
    present = [(name, value) for name, value in named.items() if value is not None]
    for name, value in present[1:]:
        if value != present[0][1]:
            raise _contradiction(*present[0], name, value, source)
    return present[0][1] if present else None


def _contradiction(name: str, value: Any, other: str, otherwise: Any, source: str) -> ModelError:
    return ModelError(
        f"{source}: config.json contradicts itself: {name}={shown(value)}, but {other}={shown(otherwise)}. Leave out "
        f"one of them."
    )
