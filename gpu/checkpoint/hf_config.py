"""A Hugging Face config.json as the model's configuration.

Old and new spellings are read. A missing key has transformers' default, which differs between families
(`Architecture.defaults`). A key that would change the numbers and is not implemented is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpu.checkpoint.architecture import Architecture
from gpu.checkpoint.config import (
    FIELDS,
    FLAG,
    MAX_EXPERTS,
    HeaderField,
    ModelConfig,
    ModelError,
    Numbers,
    RopeScaling,
    check_field,
    every_nth,
    longrope_attention_factor,
    shown,
    yarn_attention_factor,
)
from gpu.checkpoint.families.table import FAMILIES
from gpu.checkpoint.quantized_layers import quantized_checkpoint

_DTYPES = ("float32", "float16", "bfloat16")
WITH_TRANSFORMERS = (
    "Many other decoders run, slowly, where transformers is installed: pip install '.[transformers]' in a clone."
)


def config_from_hf(values: Mapping[str, Any], *, eos_token_ids: tuple[int, ...] = (), source: str) -> ModelConfig:
    """Return the `ModelConfig` of a parsed config.json.

    `eos_token_ids` are those in the model's other files; they take precedence over config.json's. `source` names the
    model in errors. Raises `ModelError` if a field is missing or wrong, or the model cannot be run.
    """
    family = _family(values, source)
    values = family.prepare(one_spelling(values, family, source))
    for name, other in family.aliases.items():
        values = {key: value for key, value in values.items() if key != name}
        values |= {name: values[other]} if other in values else {}
    fields = _Fields(values, source, family)
    for key, allowed in family.allowed_values.items():
        value = values.get(key)
        if value not in allowed:
            if key == "quantization_config" and isinstance(value, dict):
                if value.get("quant_method") not in family.quantizations:
                    quantized_checkpoint(value, source)
                continue
            named = shown(value)
            raise ModelError(f"{source}: {key}={named} in config.json is not supported; it must be {allowed[0]!r}.")
    bias = family.attention_bias
    if isinstance(bias, str):
        bias = fields.flag(bias, True)
    elif fields.flag("attention_bias", False) and not bias:
        raise ModelError(
            f"{source}: attention_bias=true in config.json is not supported for {family.name}: it adds a bias to the "
            f"output projection too. Qwen2's biases are supported."
        )

    sizes = fields.sizes()
    num_layers = sizes["num_hidden_layers"]
    rotated = fields.number("partial_rotary_factor", 1.0) if family.partial_rotary else 1.0
    without_rope = _layers_without_rope(values, fields, num_layers, family, source)
    sliding_window, layer_types = _windows(values, fields, num_layers, without_rope, family, source)
    config = ModelConfig(
        **sizes,
        architecture=family.name,
        vocab_size=fields.integer("vocab_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=fields.number("rope_theta", 10000.0),
        rope_scaling=_rope_scaling(values["rope_parameters"], fields, family, source),
        rotary_dim=None if rotated == 1.0 else int(sizes["head_dim"] * rotated),
        layers_without_rope=without_rope,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=bias,
        qk_norm=family.qk_norm,
        sliding_window=sliding_window,
        layer_types=layer_types,
        dense_layers=_dense_layers(values, fields, num_layers, source),
        torch_dtype=dtype_of(values, source),
        eos_token_ids=tuple(
            dict.fromkeys([*eos_token_ids, *token_ids(values, "eos_token_id", source=f"{source}, config.json")])
        ),
        bos_token_id=next(iter(token_ids(values, "bos_token_id", source=f"{source}, config.json")), None),
        numbers=fields.own(),
    )
    config = family.complete(config, values, source)
    check_config(config, source=source)
    return config


def check_config(config: ModelConfig, *, source: str) -> None:
    """Raise `ModelError` if numbers that are each within bounds contradict each other."""
    numbers, attention = config.numbers, config.num_attention_heads
    of_full = numbers.get("num_global_key_value_heads", 1), numbers.get("global_head_dim", 2)
    for kind, kv_heads, head_dim in (("", config.num_key_value_heads, config.head_dim), ("global_", *of_full)):
        if attention % kv_heads != 0:
            raise ModelError(
                f"{source}: num_attention_heads ({attention}) must be a multiple of num_{kind}key_value_heads "
                f"({kv_heads})."
            )
        if head_dim % 2 != 0:
            raise ModelError(f"{source}: {kind}head_dim must be even for rotary embeddings, got {head_dim}.")
    if config.rotary_dim is not None and config.rotary_dim % 2 != 0:
        raise ModelError(
            f"{source}: partial_rotary_factor must rotate an even number of a head's {config.head_dim} dimensions, got "
            f"{config.rotary_dim}."
        )
    scaling = config.rope_scaling
    rotated = config.head_dim if config.rotary_dim is None else config.rotary_dim
    pairs = int(rotated * config.numbers.get("partial_rotary_factor", 1.0)) // 2
    if scaling is not None and scaling.rope_type == "longrope":
        for name, factors in (("short_factor", scaling.short_factors), ("long_factor", scaling.long_factors)):
            if len(factors) != pairs:
                raise ModelError(
                    f"{source}: {name} must hold a number for each of the {pairs} pairs of dimensions that rotate, got "
                    f"{len(factors)}."
                )
    if scaling is not None and not scaling.low_freq_factor < scaling.high_freq_factor:
        raise ModelError(
            f"{source}: low_freq_factor ({scaling.low_freq_factor:g}) must be below high_freq_factor "
            f"({scaling.high_freq_factor:g})."
        )
    if numbers.get("linear_num_value_heads", 0) % numbers.get("linear_num_key_heads", 1):
        raise ModelError(
            f"{source}: linear_num_value_heads ({numbers['linear_num_value_heads']}) must be a multiple of "
            f"linear_num_key_heads ({numbers['linear_num_key_heads']})."
        )
    inner, heads = numbers.get("mamba_expand", 0) * config.hidden_size, numbers.get("mamba_n_heads", 1)
    groups, size = numbers.get("mamba_n_groups", 1), numbers.get("mamba_d_head", 0)
    if inner % heads or heads % groups or size not in (0, inner // heads):
        raise ModelError(
            f"{source}: mamba_n_heads ({heads}) times mamba_d_head must be mamba_expand times hidden_size ({inner}), "
            f"and mamba_n_heads a multiple of mamba_n_groups ({groups})."
        )
    rotary = int(config.head_dim * numbers.get("partial_rotary_factor", 1.0))
    if rotary % 2 or not rotary:
        raise ModelError(
            f"{source}: partial_rotary_factor must rotate an even number of a head's {config.head_dim} dimensions, got "
            f"{rotary}."
        )
    shared, layers = numbers.get("num_kv_shared_layers", 0), range(config.num_hidden_layers)
    if not {*map(config.window, layers)} <= {*map(config.window, layers[: max(0, len(layers) - int(shared))])}:
        raise ModelError(
            f"{source}: num_kv_shared_layers ({shared}) must leave layers with their own keys, of each kind in "
            f"layer_types."
        )
    per_token = numbers.get("num_experts_per_tok", 0)
    if config.num_experts and per_token > config.num_experts:
        raise ModelError(
            f"{source}: num_experts_per_tok ({per_token}) must not be above the number of experts, "
            f"{config.num_experts}."
        )
    if config.num_experts * config.num_hidden_layers > MAX_EXPERTS:
        raise ModelError(
            f"{source}: {config.num_experts:,} experts in {config.num_hidden_layers:,} layers are more than "
            f"{MAX_EXPERTS:,} in all."
        )
    special = {"BOS": () if config.bos_token_id is None else (config.bos_token_id,), "EOS": config.eos_token_ids}
    for kind, token_ids in special.items():
        wrong = next((token for token in token_ids if not 0 <= token < config.vocab_size), None)
        if wrong is not None:
            raise ModelError(
                f"{source}: the {kind} token id {shown(wrong)} must be below vocab_size ({config.vocab_size}), and not "
                f"negative."
            )


def token_ids(values: Mapping[str, Any], key: str, *, source: str) -> list[int]:
    """Return a token id field as a list: files hold one id, a list or null. Raises `ModelError` for anything else."""
    value = values.get(key)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    for token in listed:
        if type(token) is not int:
            raise ModelError(f"{source}: {key} must be a token id, a list of them or null, got {shown(token)}.")
    return listed


class _Fields(Numbers):
    """Typed access to parsed JSON; every error names the field.

    With a `family`, its defaults replace missing keys, and null is refused for keys that may not be null in
    transformers' configuration class.
    """

    def __init__(self, values: Mapping[str, Any], source: str, family: Architecture | None = None) -> None:
        super().__init__(self._found, source=source, own=family.numbers if family else None)
        self._nullable = family.nullable if family else None
        self._values = {**(family.defaults if family else {}), **values}

    def _found(self, name: str, field: HeaderField) -> tuple[object, str]:
        value, key = self._values.get(name), f"{name} in config.json"
        if value is None and name in self._values and self._nullable is not None and name not in self._nullable:
            value = check_field(field, field.null, key=key, source=self._source)
        return value, key

    def value(self, name: str) -> object:
        """Return the value, else the family's default, else None."""
        return self._values.get(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name, default)
        return bool(check_field(FLAG, value, key=f"{name} in config.json", source=self._source))


def _family(values: Mapping[str, Any], source: str) -> Architecture:
    named, model_type = values.get("architectures"), values.get("model_type")
    for architecture in named if isinstance(named, list) else []:
        if isinstance(architecture, str) and architecture in FAMILIES:
            family = FAMILIES[architecture]
            text = values.get("text_config")
            if architecture.endswith("ForConditionalGeneration") and isinstance(text, dict) and "model_type" in text:
                kind, by_type = text["model_type"], {each.model_type: each for each in FAMILIES.values()}
                if kind not in by_type:
                    raise ModelError(
                        f"{source}: {architecture} with text_config.model_type={shown(kind)} is not supported."
                    )
                family = by_type[kind]
            if model_type != family.model_type and model_type in {each.model_type for each in FAMILIES.values()}:
                raise ModelError(
                    f"{source}: config.json contradicts itself: architectures={architecture}, but "
                    f"model_type={shown(model_type)}."
                )
            return family
    raise unknown_architecture(named, source, WITH_TRANSFORMERS)


def unknown_architecture(named: object, source: str, others: str) -> ModelError:
    return ModelError(
        f"{source} is of architecture {named!r:.200}, which is not supported. {others} "
        f"Supported are {', '.join(FAMILIES)}."
    )


def _rope_scaling(rope: Mapping[str, Any], config: _Fields, family: Architecture, source: str) -> RopeScaling | None:
    """Return the scaling of `rope`; `config` has the fields around it."""
    fields = _Fields(rope, source)
    kind = family.rope_types.get(rope["rope_type"], rope["rope_type"])
    if family.query_scaling and kind != "yarn":
        raise ModelError(f"{source}: rope_type={shown(kind)} is not supported for {family.name}; it must be 'yarn'.")
    if kind == "default" and "short_factor" not in rope:
        return None
    if kind in ("linear", "yarn"):
        scaling = linear_or_yarn(kind, fields, truncate=fields.flag("truncate", True))
        return replace(scaling, query_beta=fields.number("llama_4_scaling_beta")) if family.query_scaling else scaling
    if kind == "llama3":
        return RopeScaling(
            rope_type="llama3",
            factor=fields.number("factor"),
            low_freq_factor=fields.number("low_freq_factor"),
            high_freq_factor=fields.number("high_freq_factor"),
            original_max_position_embeddings=fields.integer("original_max_position_embeddings"),
        )
    if kind == "longrope":
        return longrope(fields, config.integer("max_position_embeddings"), rope, source)
    raise ModelError(
        f"{source}: RoPE scaling {shown(rope['rope_type'])} is not supported; supported are llama3, linear, longrope "
        f"and yarn. Taking it out of config.json gives the model its original context."
    )


def longrope(
    numbers: Numbers, longest: int, divisors: Mapping[str, Any], source: str, attention_factor: str = "attention_factor"
) -> RopeScaling:
    """Return the longrope scaling of a file for contexts up to `longest`. `attention_factor` is its key there."""
    factors: list[tuple[float, ...]] = []
    for name in ("short_factor", "long_factor"):
        if not isinstance(values := divisors.get(name), list):
            raise ModelError(f"{source}: {name} in config.json must be a list of numbers, got {shown(values)}.")
        factors.append(tuple(check_field(FIELDS["factor"], each, key=name, source=source) for each in values))
    original = numbers.integer("original_max_position_embeddings", longest)
    factor = numbers.number("factor", longest / original)
    usual = longrope_attention_factor(factor, original)
    return RopeScaling(
        rope_type="longrope",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=numbers.number(attention_factor, usual),
        short_factors=factors[0],
        long_factors=factors[1],
    )


def _layers_without_rope(
    values: Mapping[str, Any], fields: _Fields, num_layers: int, family: Architecture, source: str
) -> tuple[int, ...]:
    """Return the layers without positions: those with 0 in `no_rope_layers`, else every `no_rope_layer_interval`-th, or
    all unless `position_embedding_type` is rope."""
    if "position_embedding_type" in family.allowed_values:
        return () if values.get("position_embedding_type") == "rope" else tuple(range(num_layers))
    if not family.no_rope_interval:
        return ()
    if (named := values.get("no_rope_layers")) is None:
        return every_nth(num_layers, fields.integer("no_rope_layer_interval", family.no_rope_interval))
    if not isinstance(named, list) or len(named) < num_layers or not {*map(str, named)} <= {"0", "1"}:
        raise ModelError(
            f"{source}: no_rope_layers in config.json must hold 0 or 1 for each of the {num_layers} layers, got "
            f"{shown(named)}."
        )
    return tuple(index for index in range(num_layers) if not named[index])


def linear_or_yarn(kind: str, numbers: Numbers, *, truncate: bool, mscale: float = 0.0) -> RopeScaling:
    """Return the linear or YaRN scaling of a header. `mscale` is for headers that do not have it."""
    factor = numbers.number("factor")
    if kind == "linear":
        return RopeScaling(rope_type="linear", factor=factor)
    mscale_all_dim = numbers.number("mscale_all_dim", 0.0)
    return RopeScaling(
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=numbers.integer("original_max_position_embeddings"),
        beta_fast=numbers.number("beta_fast", 32.0),
        beta_slow=numbers.number("beta_slow", 1.0),
        truncate=truncate,
        attention_factor=numbers.number(
            "attention_factor", yarn_attention_factor(factor, numbers.number("mscale", mscale), mscale_all_dim)
        ),
        mscale_all_dim=mscale_all_dim,
    )


def _dense_layers(values: Mapping[str, Any], fields: _Fields, num_layers: int, source: str) -> tuple[int, ...]:
    """Return the layers in `mlp_only_layers`, and all except every `decoder_sparse_step`-th layer."""
    named = values.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(index) is int for index in named):
        raise ModelError(f"{source}: mlp_only_layers in config.json must be a list of layers, got {shown(named)}.")
    every = fields.integer("decoder_sparse_step", 1)
    return tuple(index for index in range(num_layers) if index in named or (index + 1) % every)


def _windows(
    values: Mapping[str, Any],
    fields: _Fields,
    num_layers: int,
    without_rope: tuple[int, ...],
    family: Architecture,
    source: str,
) -> tuple[int | None, tuple[str, ...]]:
    """Return the window, and which layers have it, by the keys that the family reads (`Architecture.window_keys`).

    There is no window if it is null or `use_sliding_window` is false. Without `layer_types`, the layers of families
    with `full_layers` alternate, Qwen's have the window from layer `max_window_layers` on, SmolLM3's if they have no
    positions, and other families have it in all layers.
    """
    if family.state_layers:
        return None, _state_layers(values, fields, num_layers, family.state_layers, source)
    keys = family.window_keys
    is_on = "use_sliding_window" not in keys or fields.flag("use_sliding_window", False)
    has_window = is_on and "sliding_window" in keys and fields.value("sliding_window") is not None
    window = fields.integer("sliding_window") if has_window else None
    if family.full_layers:
        pattern = "sliding_window_pattern" in keys
        every = fields.integer("sliding_window_pattern", family.full_layers) if pattern else family.full_layers
        usual = [*ModelConfig.alternating(num_layers, every)]
    else:
        num_full = fields.integer("max_window_layers") if "max_window_layers" in keys and window else 0
        usual = [FULL if window is None or index < num_full else SLIDING for index in range(num_layers)]
        if family.no_rope_interval:
            usual = [kind if index in without_rope else FULL for index, kind in enumerate(usual)]
    named = values.get("layer_types")
    kinds = usual if named is None or (named == [] and "layer_types" not in keys) else named
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {*map(str, kinds)} <= {FULL, SLIDING}:
        raise ModelError(
            f"{source}: layer_types in config.json must name {FULL} or {SLIDING} for each of the {num_layers} "
            f"layers, got {shown(kinds)}."
        )
    if kinds != usual and "layer_types" not in keys:
        raise ModelError(
            f"{source}: layer_types in config.json are not supported for {family.name}: transformers ignores them "
            f"and uses {usual[0]} in all layers. Leave out layer_types."
        )
    if SLIDING not in kinds:
        return None, ()
    if window is None:
        reason = "sliding_window=null" if is_on else "use_sliding_window=false"
        raise ModelError(f"{source}: {reason} in config.json leaves the layers of {SLIDING} without a window.")
    return window, tuple(kinds) if FULL in kinds else ()


def _state_layers(
    values: Mapping[str, Any], fields: _Fields, num_layers: int, name: str, source: str
) -> tuple[str, ...]:
    """Return each layer's kind, `LINEAR` for one with a state (which files call `name`); () if no layer has a state.
    Without `layer_types`, those of `full_attn_idxs` (LFM2) or every `full_attention_interval`-th have attention."""
    every, kinds, full = fields.integer("full_attention_interval", 4), values.get("layer_types"), [*range(num_layers)]
    given = values.get("full_attn_idxs") if name == "conv" else full[every - 1 :: every]
    if given is not None and not (isinstance(given, list) and all(type(index) is int for index in given)):
        raise ModelError(f"{source}: full_attn_idxs in config.json must be a list of layers, got {shown(given)}.")
    if kinds is None:
        kinds = [FULL if index in (full if given is None else given) else name for index in range(num_layers)]
    if isinstance(kinds, list):  # Granite 4's names, which transformers reads in all families
        kinds = [{"mamba": LINEAR, "attention": FULL}.get(str(kind), kind) for kind in kinds]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {FULL} <= {*map(str, kinds)} <= {FULL, name}:
        raise ModelError(
            f"{source}: layer_types in config.json must name {FULL} or {name} for each of the {num_layers} layers, "
            f"and {FULL} for at least one, got {shown(kinds)}."
        )
    return tuple(LINEAR if kind == name else FULL for kind in kinds) if name in kinds else ()


def dtype_of(values: Mapping[str, Any], source: str) -> str:
    dtype = values.get("dtype") or values.get("torch_dtype") or "float32"
    if dtype not in _DTYPES:
        raise ModelError(
            f"{source}: dtype {shown(dtype)} in config.json is not supported; supported are {', '.join(_DTYPES)}."
        )
    return str(dtype)


# --------------------------------------------------------------------------------------------------------- hf spellings
# One spelling of facts that a Hugging Face config.json may state in two places.
#
# transformers 5 writes `rope_parameters` and `dtype` where older files have `rope_theta`, `rope_scaling` and
# `torch_dtype`. Some files have both, for example where a person added YaRN by `rope_scaling`. Two spellings that
# agree are read as one; two that contradict each other are refused.


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def one_spelling(values: Mapping[str, Any], family: Architecture, source: str) -> dict[str, Any]:
    """Return a copy of `values` with each fact under one key, for `family`.

    Keys of `text_config` move to the top level. `num_experts`, `dtype`, `rope_theta`, `rope_local_base_freq` and
    `partial_rotary_factor` are at the top level, all other values of rotary embeddings in `rope_parameters`, which is
    flat and has a `rope_type`. Raises `ModelError` for spellings that contradict each other.
    """
    text = mapping(values, "text_config", source)
    # A wrapper ties by default, whatever its text part would do: transformers#43429.
    merged = {**({"tie_word_embeddings": True} if text else {}), **values, **text}
    if text and family.state_layers:  # Qwen3.5's wrapper does not, and ignores its text part's value
        merged["tie_word_embeddings"] = values.get("tie_word_embeddings", False)
    routed = ("n_routed_experts",) if "n_group" in family.numbers else ()
    for name, *others in (("num_experts", "num_local_experts", *routed), ("dtype", "torch_dtype")):
        value = _agreed({each: merged.get(each) for each in (name, *others)}, source)
        if value is not None:
            merged[name] = value
    merged = family.rewrite(merged, source)
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
    elif kind := next((kind for kind in (FULL, SLIDING) if kind in (*new, *old)), None):
        raise ModelError(f"{source}: rope_parameters by type of layer ({kind}) are not supported for {family.name}.")
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
    if by_kind and scaling.get("truncate") is False:
        raise ModelError(f"{source}: transformers ignores truncate=false of {family.name}. Leave it out.")
    original = "original_max_position_embeddings"
    for name in ("rope_theta", "partial_rotary_factor", original):
        usual = family.defaults.get(name) if scaling and name == original else None
        found[name] = _agreed(
            {
                name: usual if values.get(name) is None else values[name],
                f"rope_scaling.{name}": old.get(name),
                f"rope_parameters.{name}": new.get(name),
            },
            source,
        )
    if (context := found.pop(original)) is not None and original in family.defaults:
        scaling = {**scaling, original: context}  # Phi 3 has it outside of the scaling
    return {name: value for name, value in found.items() if value is not None} | {"rope_parameters": scaling}


def _of_full_layers(
    values: Mapping[str, Any], rope: Mapping[str, Any], source: str
) -> tuple[Mapping[str, Any], float | None]:
    """Return the rotation of layers without a window, and the base of the other layers (None if not given)."""
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
    """Return `rope` with its type under `rope_type`."""
    kind = _agreed({f"{name}.{key}": rope.get(key) for key in ("rope_type", "type")}, source)
    return {key: value for key, value in rope.items() if key != "type"} | {"rope_type": kind or "default"}


def _agreed(named: Mapping[str, Any], source: str) -> Any:
    """Return the value that all set keys of `named` share, or None. Raises `ModelError` if two values differ."""
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
