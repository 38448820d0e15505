"""The text models of Gemma 2, 3, 3n and 4. `_layer` and `_finish` have the differences of 2 and 3 from Llama.

Layers with and without a window alternate. GGUF files and older config.json files lack the pattern: by default, every
second layer of Gemma 2 and every sixth of Gemma 3 has no window. In 3n and 4, the last layers read the keys and values
of earlier ones, values pass a norm, and each layer adds a vector of the token (`_layer_with_vectors`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from gpu.checkpoint import architecture, gemma_layers
from gpu.checkpoint.architecture import Part
from gpu.checkpoint.config import EXPERTS, EXPERTS_PER_TOKEN, FIELDS, FLAG, HeaderField, ModelConfig, ModelError, shown

if TYPE_CHECKING:
    from gpu.checkpoint.gguf_file import GGUFFile

_ACTIVATIONS = ("gelu_pytorch_tanh", None)
_VALUES: Mapping[str, tuple[Any, ...]] = {
    **architecture.LLAMA_VALUES,
    "hidden_activation": _ACTIVATIONS,
    "hidden_act": _ACTIVATIONS,
    "use_bidirectional_attention": (False, None),
}
_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_SCALAR = HeaderField(float, 0.0, 1e6, "", default=0.0)  # 0 means none, for the caps too
_CAP = replace(_SCALAR, null=0.0)
_WINDOW_KEYS = frozenset({"sliding_window", "layer_types"})


def _gemma_norm(norm: architecture.RMSNormSpec) -> architecture.RMSNormSpec:
    return replace(norm, weight=replace(norm.weight, offset=1.0))


def _layer(config: ModelConfig, index: int, *, largest: int) -> architecture.LayerSpec:
    """Return a layer with four norms by 1 + w, GeGLU, and the configuration's scale of scores. GGUF files lack the
    scale: it follows from the head's size, or, in the model with `largest` layers, from hidden size / heads.
    """
    layer, numbers = architecture.llama_layer(config, index), config.numbers
    attention, inner = layer.attention, layer.feed_forward
    assert isinstance(inner, architecture.SwiGLUSpec)

    norm = partial(architecture.norm_of_layer, config, index, offset=1.0)
    by_layers = config.hidden_size / config.num_attention_heads if config.num_hidden_layers == largest else None
    scalar = numbers.get("query_pre_attn_scalar") or by_layers or config.head_dim
    heads = replace(attention.heads, scale=float(scalar) ** -0.5, softcap=numbers.get("attn_logit_softcapping") or None)
    is_local = heads.window is not None and "rope_local_base_freq" in numbers
    return architecture.LayerSpec(
        attention_norm=norm("input_layernorm", "attn_norm"),
        attention=replace(
            attention,
            heads=heads,
            qk_norm=attention.qk_norm and (_gemma_norm(attention.qk_norm[0]), _gemma_norm(attention.qk_norm[1])),
            rope=architecture.Rope(numbers["rope_local_base_freq"]) if is_local else attention.rope,
        ),
        attention_post_norm=norm("post_attention_layernorm", "post_attention_norm"),
        feed_forward_norm=norm("pre_feedforward_layernorm", "ffn_norm"),
        feed_forward=architecture.GeGLUSpec(inner.gate, inner.up, inner.down),
        feed_forward_post_norm=norm("post_feedforward_layernorm", "post_ffw_norm"),
    )


def _finish(spec: architecture.DecoderSpec, config: ModelConfig) -> architecture.DecoderSpec:
    return replace(
        spec,
        norm=spec.norm and _gemma_norm(spec.norm),
        embedding_scale=config.hidden_size**0.5,
        rounds_scale=True,
        softcap=config.numbers.get("final_logit_softcapping") or None,
    )


GEMMA2 = architecture.Architecture(
    name="Gemma2ForCausalLM",
    model_type="gemma2",
    gguf="gemma2",
    defaults={**_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    allowed_values={**_VALUES, "sliding_window_pattern": (2, None)},
    numbers={
        "query_pre_attn_scalar": _SCALAR,
        "attn_logit_softcapping": replace(_CAP, gguf="attn_logit_softcapping", default=50.0),
        "final_logit_softcapping": replace(_CAP, gguf="final_logit_softcapping", default=30.0),
    },
    full_layers=2,
    window_keys=_WINDOW_KEYS,
    layer=partial(_layer, largest=46),
    finish=_finish,
)
GEMMA3 = architecture.Architecture(
    name="Gemma3ForCausalLM",
    model_type="gemma3_text",
    gguf="gemma3",
    defaults=_DEFAULTS
    | {"rope_theta": 1e6, "vocab_size": 262208, "max_position_embeddings": 131072}
    | {"num_attention_heads": 8},
    allowed_values={**_VALUES, "attn_logit_softcapping": (None,)},
    qk_norm=True,
    numbers={
        "query_pre_attn_scalar": _SCALAR,
        "final_logit_softcapping": replace(_CAP, gguf="final_logit_softcapping"),
        "rope_local_base_freq": HeaderField(float, 1.0, 1e12, "", "rope.freq_base_swa", default=10000.0),
    },
    full_layers=6,
    window_keys=_WINDOW_KEYS | {"sliding_window_pattern"},
    layer=partial(_layer, largest=62),
    finish=_finish,
)


# ---------------------------------------------------------------------------------------------------------- gemma 3n, 4

FULL, SLIDING = "full_attention", "sliding_attention"


def _layer_with_vectors(config: ModelConfig, index: int, *, inner: int | None = None) -> gemma_layers.GemmaLayerSpec:
    """Return a layer with values that pass a norm, and with the rotation, KV heads and head size of its kind."""
    is_full, numbers = config.window(index) is None, config.numbers
    heads, dim = config.kv_heads(index)
    inner = inner or config.intermediate_size
    own = replace(config, head_dim=dim, num_key_value_heads=heads, intermediate_size=inner, qk_norm=True)
    layer = architecture.llama_layer(own, index)
    attention, network = layer.attention, layer.feed_forward
    assert isinstance(network, architecture.SwiGLUSpec)
    query, key, value = attention.qkv
    is_reader, same = config.source(index) != index, is_full and numbers.get("attention_k_eq_v")
    rotary = 2 * int(numbers.get("rope_proportion", 1.0) * dim // 2)
    norm = partial(architecture.norm_of_layer, config, index)
    size = int(numbers["hidden_size_per_layer_input"])

    def part(name: str, gguf: str, *shape: int) -> Part:
        return Part(f"model.layers.{index}.{name}", f"blk.{index}.{gguf}", shape)

    return gemma_layers.GemmaLayerSpec(
        attention_norm=layer.attention_norm,
        attention=gemma_layers.NormedAttentionSpec(
            heads=replace(attention.heads, scale=1.0),
            qkv=(query,) if is_reader else (query, key) if same else (query, key, value),
            out=attention.out,
            qk_norm=attention.qk_norm[:1] if is_reader else attention.qk_norm,
            rope=architecture.Rope(config.rope_theta, config.rope_scaling, rotary, size=dim, proportional=True)
            if is_full
            else architecture.Rope(numbers["rope_local_base_freq"]),
        ),
        attention_post_norm=norm("post_attention_layernorm", "post_attention_norm"),
        feed_forward_norm=norm("pre_feedforward_layernorm", "ffn_norm"),
        feed_forward=architecture.GeGLUSpec(network.gate, network.up, network.down),
        feed_forward_post_norm=norm("post_feedforward_layernorm", "post_ffw_norm"),
        per_layer_input=gemma_layers.PerLayerInputSpec(
            gate=part("per_layer_input_gate", "inp_gate", size, config.hidden_size),
            projection=part("per_layer_projection", "proj", config.hidden_size, size),
            norm=norm("post_per_layer_input_norm", "post_norm"),
        )
        if size
        else None,
    )


def _finish_with_vectors(spec: architecture.DecoderSpec, config: ModelConfig) -> architecture.DecoderSpec:
    numbers, hidden, size = config.numbers, config.hidden_size, int(config.numbers["hidden_size_per_layer_input"])
    all_sizes = config.num_hidden_layers * size
    rows = int(numbers["vocab_size_per_layer_input"])
    norm = Part("model.per_layer_projection_norm", "per_layer_proj_norm", (size,))
    per_layer = gemma_layers.PerLayerEmbeddingSpec(
        embedding=Part("model.embed_tokens_per_layer", "per_layer_token_embd", (rows, all_sizes)),
        projection=Part("model.per_layer_model_projection", "per_layer_model_proj", (all_sizes, hidden)),
        norm=architecture.RMSNormSpec(norm, config.rms_norm_eps),
    )
    return replace(
        spec,
        embedding_scale=hidden**0.5,
        rounds_scale=True,
        softcap=numbers["final_logit_softcapping"] or None,
        per_layer=per_layer if size else None,
    )


def _check(values: Mapping[str, Any], source: str, key: str, holds: bool, allowed: str) -> None:
    if not holds:
        raise ModelError(f"{source}: {key}={shown(values.get(key))} in config.json is not supported; {allowed}.")


_SINCE_3N: dict[str, Any] = {"nullable": frozenset(), "qk_norm": True, "window_keys": _WINDOW_KEYS}
_DEFAULTS_SINCE_3N = {"head_dim": 256, "tie_word_embeddings": True, "sliding_window": 512, "rope_theta": 1e6}
_NUMBERS = {
    "final_logit_softcapping": HeaderField(float, 0.0, 1e6, "", default=0.0, null=0.0),
    "num_kv_shared_layers": HeaderField(int, 0, 2**10, "layers", default=0),
    "hidden_size_per_layer_input": HeaderField(int, 0, 2**14, "elements", default=256),
    "vocab_size_per_layer_input": replace(FIELDS["vocab_size"], default=262144),
    "rope_local_base_freq": HeaderField(float, 1.0, 1e12, "", default=10000.0),
}


def _gemma3n_layer(config: ModelConfig, index: int) -> architecture.LayerSpec:
    numbers, hidden = config.numbers, config.hidden_size
    count, rank = int(numbers["altup_num_inputs"]), int(numbers["laurel_rank"])
    layer, norm = _layer_with_vectors(config, index), partial(architecture.norm_of_layer, config, index)
    if index < numbers["sparse_layers"] and numbers["sparsity"] > 0.0:
        deviations = NormalDist().inv_cdf(numbers["sparsity"])
        sparse = gemma_layers.SparseGeGLUSpec(**vars(layer.feed_forward), deviations=deviations)
        layer = replace(layer, feed_forward=sparse)

    def part(name: str, gguf: str, *shape: int, suffix: str = ".weight") -> Part:
        return Part(f"model.layers.{index}.{name}", f"blk.{index}.{gguf}", shape, suffix=suffix)

    return gemma_layers.AltUpLayerSpec(
        **vars(layer),
        active=int(numbers["altup_active_idx"]),
        router=part("altup.modality_router", "altup_router", count, hidden),
        router_norm=norm("altup.router_norm", "altup_router_norm"),
        prediction=part("altup.prediction_coefs", "altup_predict_coef", count * count, count),
        correction=part("altup.correction_coefs", "altup_correct_coef", count, count),
        scale=part("altup.correct_output_scale", "altup_correct_scale", hidden, suffix=""),
        is_scaled=bool(numbers["altup_correct_scale"]),
        left=part("laurel.linear_left", "laurel_l", rank, hidden),
        right=part("laurel.linear_right", "laurel_r", hidden, rank),
        residual_norm=norm("laurel.post_laurel_norm", "laurel_post_norm"),
    )


def _gemma3n_finish(spec: architecture.DecoderSpec, config: ModelConfig) -> architecture.DecoderSpec:
    shape, count = (config.hidden_size, config.hidden_size), int(config.numbers["altup_num_inputs"]) - 1
    projections, back = (
        tuple(Part(f"model.altup_{name}.{index}", gguf, shape, expert=index) for index in range(count))
        for name, gguf in (("projections", "altup_proj"), ("unembed_projections", "altup_unembd_proj"))
    )
    return replace(_finish_with_vectors(spec, config), streams=gemma_layers.StreamsSpec(projections, back))


def _gemma3n_rewrite(values: dict[str, Any], source: str) -> dict[str, Any]:
    """Return config.json with one size of all networks, and with `activation_sparsity_pattern` as the `sparsity` of the
    first `sparse_layers` layers."""
    get: Callable[..., Any] = values.get
    check = partial(_check, values, source)
    count, sizes, pattern = get("num_hidden_layers"), get("intermediate_size"), get("activation_sparsity_pattern")
    numbers = {key: get(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")}
    numbers |= {"altup_num_inputs": get("altup_num_inputs", 4), "altup_active_idx": get("altup_active_idx", 0)}
    for key, value in numbers.items():
        check(key, type(value) is int and 0 <= value < 2**20, "it must be an integer")
    heads = numbers["num_attention_heads"]
    check("hidden_size", heads > 0 and get("hidden_size") % heads == 0, "it must be a multiple of num_attention_heads")
    is_one = numbers["altup_active_idx"] < numbers["altup_num_inputs"]
    check("altup_active_idx", is_one, "it must be below altup_num_inputs")
    check("final_logit_softcapping", get("final_logit_softcapping", 30.0) != 0, "it must be above 0")
    if isinstance(sizes, list):
        alike = len(sizes) == count and len({*map(str, sizes)}) == 1
        check("intermediate_size", alike, "all layers must have the same")
        values = values | {"intermediate_size": sizes[0]}
    if pattern is None:
        pattern = [0.95 if count > 10 and index < 10 else 0.0 for index in range(count)]
    are_shares = isinstance(pattern, list) and len(pattern) == count > 0 and {*map(type, pattern)} == {float}
    needed = "it must hold a number below 1 for each layer, the same for the first layers and 0 for all others"
    check("activation_sparsity_pattern", are_shares, needed)
    sparse = len(pattern) - pattern.count(0.0)
    is_prefix = pattern == pattern[:1] * sparse + [0.0] * (count - sparse) and 0 <= pattern[0] <= 0.9999
    check("activation_sparsity_pattern", is_prefix, needed)
    return values | {"sparsity": pattern[0], "sparse_layers": sparse}


GEMMA3N = architecture.Architecture(
    name="Gemma3nForCausalLM",
    model_type="gemma3n_text",
    gguf="gemma3n",
    defaults=_DEFAULTS_SINCE_3N | {"num_key_value_heads": 2},
    allowed_values=_VALUES,
    numbers=_NUMBERS
    | {
        "final_logit_softcapping": replace(_NUMBERS["final_logit_softcapping"], default=30.0, null=None),
        "num_kv_shared_layers": replace(_NUMBERS["num_kv_shared_layers"], default=15),
        "hidden_size_per_layer_input": HeaderField(int, 1, 2**14, "elements", default=256),
        "altup_num_inputs": HeaderField(int, 1, 64, "streams", default=4),
        "altup_active_idx": HeaderField(int, 0, 63, "streams", default=0),
        "altup_correct_scale": replace(FLAG, default=True),
        "laurel_rank": HeaderField(int, 1, 2**14, "elements", default=64),
        "sparsity": HeaderField(float, 0.0, 1.0, "of activations"),
        "sparse_layers": HeaderField(int, 0, 2**10, "layers"),
    },
    full_layers=5,
    rewrite=_gemma3n_rewrite,
    layer=_gemma3n_layer,
    finish=_gemma3n_finish,
    **_SINCE_3N,
)


def _gemma4_layer(config: ModelConfig, index: int) -> architecture.LayerSpec:
    numbers = config.numbers
    is_wide = numbers["use_double_wide_mlp"] and config.source(index) != index
    layer = _layer_with_vectors(config, index, inner=config.intermediate_size * (2 if is_wide else 1))
    scalar = Part(f"model.layers.{index}.layer_scalar", f"blk.{index}.layer_output_scale", (1,), suffix="")
    experts = _experts(config, index) if config.num_experts else None
    return replace(layer, scalar=scalar, experts=experts)


def _experts(config: ModelConfig, index: int) -> gemma_layers.ParallelExpertsSpec:
    inner, prefix = int(config.numbers["moe_intermediate_size"]), f"model.layers.{index}.router"
    gate = architecture.Stack("experts.gate_up_proj", stop=inner, outputs_first=True, in_gguf=True)
    experts = architecture.mixture_of_experts(
        config,
        index,
        router="router.proj",
        networks=("experts.{}.gate_proj", "experts.{}.up_proj", "experts.{}.down_proj"),
        inner=inner,
        normalized=True,
        stacks=(
            gate,
            replace(gate, start=inner, stop=None),
            architecture.Stack("experts.down_proj", outputs_first=True),
        ),
    )
    fused = f"blk.{index}.ffn_gate_up_exps"
    networks = tuple(
        architecture.GeGLUSpec(replace(each.gate, gguf=fused), replace(each.up, gguf=fused), each.down)
        for each in experts.experts
    )
    norm = partial(architecture.norm_of_layer, config, index)
    return gemma_layers.ParallelExpertsSpec(
        experts=replace(experts, experts=networks),
        scale=Part(f"{prefix}.scale", f"blk.{index}.ffn_gate_inp.scale", (config.hidden_size,), suffix=""),
        expert_scale=Part(
            f"{prefix}.per_expert_scale", f"blk.{index}.ffn_down_exps.scale", (config.num_experts,), suffix=""
        ),
        norm=norm("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
        post_norm=norm("post_feedforward_layernorm_2", "post_ffw_norm_2"),
        dense_post_norm=norm("post_feedforward_layernorm_1", "post_ffw_norm_1"),
    )


def _gemma4_rewrite(values: dict[str, Any], source: str) -> dict[str, Any]:
    """Return config.json with one spelling: `rope_proportion` is the rotated share of full layers, `global_head_dim`
    and `num_global_key_value_heads` are their heads. Without experts it has no keys of experts."""
    get: Callable[..., Any] = values.get
    check, count = partial(_check, values, source), get("num_hidden_layers")
    for key in ("rope_scaling", "rope_theta", "rope_local_base_freq"):
        check(key, get(key) is None, "Gemma 4 has rotations in rope_parameters")
    check("final_logit_softcapping", get("final_logit_softcapping") != 0, "it must be null or above 0")
    check("num_hidden_layers", type(count) is int and 0 < count <= 2**10, "it must be an integer from 1 to 1,024")
    shares = not get("num_kv_shared_layers") or get("hidden_size_per_layer_input", 256) != 0
    check("num_kv_shared_layers", shares, "transformers fails with it if hidden_size_per_layer_input is 0")
    kinds: Any = get("layer_types")
    kinds = [*ModelConfig.alternating(count or 0, 6)[:-1], FULL] if kinds is None else kinds
    check("layer_types", isinstance(kinds, list) and kinds[-1:] == [FULL], f"the last must be {FULL}")

    ropes: Any = get("rope_parameters")
    if ropes is None:
        usual = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
        ropes = {FULL: usual, SLIDING: {"rope_type": "default", "rope_theta": 1e4}}
    rope: Any
    local: Any
    rope, local = (ropes.get(kind) if isinstance(ropes, dict) else None for kind in (FULL, SLIDING))
    fits = isinstance(rope, dict) and isinstance(local, dict) and {*ropes} == {FULL, SLIDING}
    fits = fits and rope.get("rope_type") in ("proportional", "default") and local.get("rope_type") == "default"
    fits = fits and None not in (rope.get("rope_theta"), local.get("rope_theta"))
    fits = fits and local.get("partial_rotary_factor", 1.0) == 1.0
    check(
        "rope_parameters", fits, f"it must have types and thetas of {FULL} (proportional, default), {SLIDING} (default)"
    )
    is_proportional = rope["rope_type"] == "proportional"
    scaling = {"rope_theta": rope["rope_theta"]}
    if is_proportional and "factor" in rope:
        scaling |= {"rope_type": "linear", "factor": rope["factor"]}

    heads = get("num_key_value_heads", 4)
    given = get("num_global_key_value_heads") if get("attention_k_eq_v") else None
    own = {"head_dim": get("global_head_dim", 512), "num_key_value_heads": heads if given is None else given}
    if "per_layer_config" in values:  # as transformers saves it
        full, of_layers = [str(index) for index, kind in enumerate(kinds) if kind == FULL], values["per_layer_config"]
        of_one: Any = of_layers.get(full[-1]) if isinstance(of_layers, dict) else None
        alike = isinstance(of_one, dict) and of_layers == dict.fromkeys(full, of_one) and {*of_one} <= {*own}
        check("per_layer_config", alike, f"all layers of {FULL} must have the same {' and '.join(own)}")
        own = {"head_dim": get("head_dim", 256), "num_key_value_heads": heads, **of_one}
    experts = dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size"), 0)
    if get("enable_moe_block"):
        experts = {key: get(key) for key in experts}
        for key, value in experts.items():
            check(key, bool(value), "enable_moe_block=true needs it")
    changes = {
        "per_layer_config": None,
        "layer_types": kinds,
        "rope_proportion": rope.get("partial_rotary_factor", 1.0) if is_proportional else 1.0,
        "rope_parameters": {FULL: scaling, SLIDING: {"rope_theta": local["rope_theta"]}},
        "global_head_dim": own["head_dim"],
        "num_global_key_value_heads": own["num_key_value_heads"],
        "num_experts_per_tok": experts["top_k_experts"],
    }
    return values | experts | changes


_FLAG = replace(FLAG, default=False)
GEMMA4 = architecture.Architecture(
    name="Gemma4ForCausalLM",
    model_type="gemma4_text",
    gguf="gemma4",
    defaults=_DEFAULTS_SINCE_3N | {"num_key_value_heads": 4},
    allowed_values={**_VALUES, "use_bidirectional_attention": (None, "vision")},
    numbers=_NUMBERS
    | dict.fromkeys(("attention_k_eq_v", "use_double_wide_mlp", "enable_moe_block"), _FLAG)
    | {
        "rope_proportion": HeaderField(float, 0.0, 1.0, "of a head"),
        "global_head_dim": FIELDS["head_dim"],
        "num_global_key_value_heads": FIELDS["num_key_value_heads"],
        "num_experts": replace(EXPERTS, low=0),
        "num_experts_per_tok": replace(EXPERTS_PER_TOKEN, low=0),
        "moe_intermediate_size": replace(FIELDS["intermediate_size"], low=0),
    },
    full_layers=6,
    rewrite=_gemma4_rewrite,
    layer=_gemma4_layer,
    finish=_finish_with_vectors,
    **_SINCE_3N,
)


# ----------------------------------------------------------------------------------------------------------- gguf files

_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
}
_STREAM_KEYS = {"altup_active_idx": "altup.active_idx", "altup_num_inputs": "altup.num_inputs"}
_HEAD_KEYS = {"global_head_dim": "attention.key_length", "head_dim": "attention.key_length_swa"}
_EXPERT_KEYS = {
    "num_experts": "expert_count",
    "top_k_experts": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_NOT_ROTATED = 1e20  # a larger divisor of a frequency means that its pair does not rotate


def values_of_gguf(file: GGUFFile, family: architecture.Architecture) -> dict[str, Any]:
    """Return the config.json of Gemma 3n or 4 from which a converter wrote the metadata of `file`, so that files of
    both kinds pass the same checks. Raises ModelError for metadata that is missing or contradicts itself."""
    prefix, is_3n, get = f"{family.gguf}.", family is GEMMA3N, file.metadata.get
    keys = _KEYS | (_STREAM_KEYS if is_3n else _HEAD_KEYS)
    if not is_3n and get(f"{prefix}expert_count"):
        keys |= _EXPERT_KEYS
    values: dict[str, Any] = {key: get(prefix + gguf) for key, gguf in keys.items()}

    def check(key: str, holds: bool, needed: str) -> None:
        if not holds:
            raise ModelError(
                f"{file.path.name}: metadata {prefix}{key} must be {needed}, got {shown(get(prefix + key))}. Convert "
                "the model anew."
            )

    for key, gguf in keys.items():
        check(gguf, values[key] is not None, "there")
    count, shared = (file.require(f"{prefix}{key}", int) for key in ("block_count", "attention.shared_kv_layers"))
    windows = file.require_array(f"{prefix}attention.sliding_window_pattern", bool)
    check("attention.sliding_window_pattern", len(windows) == count, "an array with an entry for each layer")
    theta, local = file.require(f"{prefix}rope.freq_base", float), file.get(f"{prefix}rope.freq_base_swa", float, 1e4)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if is_3n:
        of_sparse = file.require_array(f"{prefix}activation_sparsity_scale", float)
        values["activation_sparsity_pattern"] = [round(NormalDist().cdf(each), 6) for each in of_sparse]
        first = file.tensors.get("blk.0.laurel_l.weight")
        values["laurel_rank"] = first.shape[0] if first else 1
    else:
        heads, inner = values["num_key_value_heads"], values["intermediate_size"]
        if isinstance(heads, list):
            of_kind = [
                {heads[index] for index, has in enumerate(windows[: len(heads)]) if has == kind} for kind in (1, 0)
            ]
            is_known = len(heads) == count and [*map(len, of_kind)] == [1, 1]
            check("attention.head_count_kv", is_known, "an array with one number for each kind of layer")
            values |= {"num_key_value_heads": of_kind[0].pop(), "num_global_key_value_heads": of_kind[1].pop()}
        if isinstance(inner, list):
            wide = inner[:1] * (count - shared) + [2 * each for each in inner[:1]] * shared
            check("feed_forward_length", inner == wide, "twice as much in layers that read the keys of others")
            values |= {"intermediate_size": inner[0], "use_double_wide_mlp": True}
        full = [index for index, has_window in enumerate(windows[: count - shared]) if not has_window]
        have_values = [f"blk.{index}.attn_v.weight" in file.tensors for index in full]
        values |= {"attention_k_eq_v": not any(have_values), "enable_moe_block": "num_experts" in values}
        if "rope_freqs.weight" in file.tensors:
            divisors = file.read("rope_freqs.weight").ravel()
            rotated = int((divisors == 1.0).sum())
            are_known = (divisors[:rotated] == 1.0).all() and (divisors[rotated:] > _NOT_ROTATED).all()
            check("rope_freqs.weight", bool(are_known), "1 for the pairs that rotate, followed by 1e30 for others")
            rope |= {"rope_type": "proportional", "partial_rotary_factor": rotated / max(1, len(divisors))}
    for swa in ("", "_swa"):
        size = get(f"{prefix}attention.key_length{swa}")
        check(f"attention.value_length{swa}", get(f"{prefix}attention.value_length{swa}") == size, "that of keys")
        check(f"rope.dimension_count{swa}", get(f"{prefix}rope.dimension_count{swa}", size) == size, "that of keys")
    check("rope.scaling.type", get(f"{prefix}rope.scaling.type") in (None, "none"), "none")
    embeddings = file.tensors.get("per_layer_token_embd.weight")
    if (cap := get(f"{prefix}final_logit_softcapping")) is not None:
        values["final_logit_softcapping"] = cap
    return values | {
        "architectures": [family.name],
        "model_type": family.model_type,
        "layer_types": [SLIDING if has_window else FULL for has_window in windows],
        "rope_parameters": {FULL: rope, SLIDING: {"rope_type": "default", "rope_theta": local}},
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "vocab_size_per_layer_input": embeddings.shape[0] if embeddings else 1,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "bfloat16",  # files do not record it
    }
