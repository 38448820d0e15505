"""DeepSeek V2 and V3, Kimi K2 and GLM-4.7-Flash with latent attention, and GLM-4.5 with their experts.

The first layers have a dense network, the others experts chosen in groups and a shared expert without a gate. In this
project's configuration `head_dim` is the number of dimensions that rotate. Norms of latents have their own epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from gpu.checkpoint import architecture
from gpu.checkpoint.architecture import Architecture, LayerSpec, Part, RMSNormSpec
from gpu.checkpoint.config import EXPERTS, EXPERTS_PER_TOKEN, FIELDS, FLAG, HeaderField, ModelConfig, ModelError, shown

_LATENT_EPS = 1e-6
_SIZE = HeaderField(int, 1, 2**14, "elements")
_GROUPS = HeaderField(int, 1, 2**10, "groups", "expert_group_count", default=1)
_INNER = replace(FIELDS["intermediate_size"], gguf="expert_feed_forward_length")
_EXPERTS = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS_PER_TOKEN,
    "moe_intermediate_size": _INNER,
    "n_shared_experts": HeaderField(int, 1, 2**6, "experts", "expert_shared_count"),
    "routed_scaling_factor": HeaderField(float, 1e-6, 1e6, "", "expert_weights_scale", default=1.0),
    "norm_topk_prob": replace(FLAG, gguf="expert_weights_norm", default=False),
    "n_group": _GROUPS,
    "topk_group": replace(_GROUPS, gguf="expert_group_used_count"),
    "first_k_dense_replace": HeaderField(int, 0, 2**10, "layers", "leading_dense_block_count", default=0),
}
_LATENTS = {
    "q_lora_rank": replace(_SIZE, low=0, gguf="attention.q_lora_rank", default=0, null=0),  # 0: queries have no latents
    "kv_lora_rank": replace(_SIZE, gguf="attention.kv_lora_rank"),
    "qk_nope_head_dim": replace(_SIZE, gguf="attention.key_length_mla"),  # GGUF files count what rotates, too
    "qk_rope_head_dim": replace(FIELDS["head_dim"], gguf="rope.dimension_count"),
    "v_head_dim": replace(_SIZE, gguf="attention.value_length_mla"),
    "rope_interleave": replace(FLAG, default=True, null=False),
}
# Keys that transformers ignores for these families, with the values that it computes.
_VALUES: dict[str, tuple[Any, ...]] = {
    **architecture.PARTIAL_VALUES,
    "moe_layer_freq": (1, None),
    "mlp_only_layers": ([], None),
    "decoder_sparse_step": (1, None),
}
_ALL_ROTATE: dict[str, tuple[Any, ...]] = {"partial_rotary_factor": (1.0, None)}
_SIGMOID: dict[str, tuple[Any, ...]] = {"scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None)}


def _mixture(config: ModelConfig, index: int, *, sigmoid: bool) -> architecture.MoESpec:
    """Return the experts of a layer. Its router has sigmoid scores, or softmax scores."""
    experts, numbers = architecture.stacked_experts(config, index), config.numbers
    inner = int(numbers["moe_intermediate_size"]) * int(numbers["n_shared_experts"])
    experts = architecture.with_shared_expert(experts, config, index, inner, name="shared_experts", gated=False)
    name, count = f"model.layers.{index}.mlp.gate.e_score_correction", (config.num_experts,)
    return architecture.GroupedMoESpec(
        **vars(experts),
        correction=Part(name, f"blk.{index}.exp_probs_b", count, suffix="_bias") if sigmoid else None,
        num_groups=int(numbers["n_group"]),
        top_groups=int(numbers["topk_group"]),
        scale=float(numbers["routed_scaling_factor"]),
    )


def _attention(config: ModelConfig, index: int) -> architecture.LatentAttentionSpec:
    numbers, hidden, heads = config.numbers, config.hidden_size, config.num_attention_heads
    queries, latents = int(numbers["q_lora_rank"]), int(numbers["kv_lora_rank"])
    rotated, plain, values = config.head_dim, int(numbers["qk_nope_head_dim"]), int(numbers["v_head_dim"])

    def part(name: str, gguf: str, *shape: int) -> Part:
        return Part(f"model.layers.{index}.self_attn.{name}", f"blk.{index}.{gguf}", shape)

    def norm(name: str, gguf: str, size: int) -> RMSNormSpec:
        return RMSNormSpec(part(name, gguf, size), _LATENT_EPS)

    scale, rope = (plain + rotated) ** -0.5, config.rope_scaling
    if rope is not None and rope.factor > 1.0:
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
    query = part("q_proj", "attn_q", heads * (plain + rotated), hidden)
    query_latent = None
    if queries:
        query = part("q_b_proj", "attn_q_b", heads * (plain + rotated), queries)
        query_norm = norm("q_a_layernorm", "attn_q_a_norm", queries)
        query_latent = part("q_a_proj", "attn_q_a", queries, hidden), query_norm
    return architecture.LatentAttentionSpec(
        heads=architecture.Heads(heads, 1, latents + rotated, scale, values=latents),
        qkv=(
            query,
            part("kv_a_proj_with_mqa", "attn_kv_a_mqa", latents + rotated, hidden),
            part("kv_b_proj", "attn_kv_b", heads * (plain + values), latents),
        ),
        out=part("o_proj", "attn_output", hidden, heads * values),
        qk_norm=None,
        rope=architecture.Rope(config.rope_theta, rope),
        latent_norm=norm("kv_a_layernorm", "attn_kv_a_norm", latents),
        query_latent=query_latent,
        interleaved=bool(numbers["rope_interleave"]),
    )


def _layer(config: ModelConfig, index: int, *, latent: bool = True, sigmoid: bool = True) -> LayerSpec:
    layer = architecture.llama_layer(config, index)
    if latent:
        layer = replace(layer, attention=_attention(config, index))
    is_dense = index < config.numbers["first_k_dense_replace"] or index in config.dense_layers
    return layer if is_dense else replace(layer, feed_forward=_mixture(config, index, sigmoid=sigmoid))


# Completions of a configuration (`Architecture.complete`).


def _complete(config: ModelConfig, values: Mapping[str, Any], source: str, *, best: int = 2) -> ModelConfig:
    """Check the groups of experts, each of which has at least `best`."""
    numbers = config.numbers
    groups, chosen, per_token = (int(numbers[name]) for name in ("n_group", "topk_group", "num_experts_per_tok"))
    size, rest = divmod(config.num_experts, groups)
    if rest or size < best or chosen > groups or per_token > chosen * size:
        raise ModelError(
            f"{source}: n_group ({groups}) must divide the {config.num_experts} experts into equal groups of at least "
            f"{best}; topk_group ({chosen}) must be at most n_group, and so many groups must have at least "
            f"num_experts_per_tok ({per_token}) experts."
        )
    return replace(config, qk_norm=bool(numbers.get("use_qk_norm", False)))


def _complete_latent(config: ModelConfig, values: Mapping[str, Any], source: str, *, best: int = 2) -> ModelConfig:
    """Take the dimensions that rotate as `head_dim`. GGUF files count them to a head's key, and hold a tenth of
    `mscale_all_dim`, with which cosines and sines have the factor 1."""
    rotated = int(config.numbers["qk_rope_head_dim"])
    config = replace(config, head_dim=rotated, rotary_dim=None)
    if not values:
        plain, rope = int(config.numbers["qk_nope_head_dim"]) - rotated, config.rope_scaling
        if plain < 1:
            raise ModelError(f"{source}: attention.key_length_mla must exceed rope.dimension_count ({rotated}).")
        if rope is not None and rope.mscale_all_dim:
            rope = replace(rope, mscale_all_dim=10 * rope.mscale_all_dim, attention_factor=1.0)
        numbers = {**config.numbers, "qk_nope_head_dim": plain}
        config = replace(config, rope_scaling=rope, numbers=numbers, num_key_value_heads=config.num_attention_heads)
    if values.get("head_dim", rotated) != rotated:
        raise ModelError(f"{source}: head_dim={shown(values['head_dim'])} contradicts qk_rope_head_dim={rotated}.")
    if config.num_key_value_heads != config.num_attention_heads:
        raise ModelError(
            f"{source}: num_key_value_heads ({config.num_key_value_heads}) must be num_attention_heads "
            f"({config.num_attention_heads}) with latent attention."
        )
    if values.get("q_lora_rank") == 0:
        raise ModelError(f"{source}: q_lora_rank must be a positive number or null, got 0.")
    return _complete(config, values, source, best=best)


def _complete_v2(config: ModelConfig, values: Mapping[str, Any], source: str) -> ModelConfig:
    method = values.get("topk_method", "greedy")
    if values and method == "greedy":
        config = replace(config, numbers={**config.numbers, "n_group": 1, "topk_group": 1})
    if method is None or not config.numbers["n_group"] or not config.numbers["topk_group"]:
        raise ModelError(
            f"{source}: topk_method must be greedy, or group_limited_greedy with n_group and topk_group, got "
            f"{shown(method)}."
        )
    if config.hidden_size % config.num_attention_heads:
        raise ModelError(
            f"{source}: hidden_size ({config.hidden_size}) must be a multiple of num_attention_heads "
            f"({config.num_attention_heads})."
        )
    return _complete_latent(config, values, source, best=1)


def _complete_flash(config: ModelConfig, values: Mapping[str, Any], source: str) -> ModelConfig:
    """Take the layers without experts from `mlp_layer_types`, by default the first."""
    kinds, count = values.get("mlp_layer_types"), config.num_hidden_layers
    kinds = ["dense"] + ["sparse"] * (count - 1) if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != count or not {*map(str, kinds)} <= {"dense", "sparse"}:
        raise ModelError(
            f"{source}: mlp_layer_types in config.json must name dense or sparse for each of the {count} layers, got "
            f"{shown(kinds)}."
        )
    dense = tuple(index for index, kind in enumerate(kinds) if kind == "dense")
    return replace(_complete_latent(config, values, source), dense_layers=dense)


_OF_V3: dict[str, Any] = {"num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512}
_OF_V3 |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_OF_V3 |= {"num_experts": 256, "num_experts_per_tok": 8}
_OF_V3 |= {"moe_intermediate_size": 2048, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
_OF_V3 |= {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3}
DEEPSEEK_V3 = Architecture(
    name="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    gguf="deepseek2",
    defaults=_OF_V3,
    nullable=frozenset({"num_key_value_heads"}),
    allowed_values={**_VALUES, **_ALL_ROTATE, **_SIGMOID, "mlp_layer_types": (None,)},
    numbers={**_EXPERTS, **_LATENTS, "norm_topk_prob": replace(_EXPERTS["norm_topk_prob"], null=False)},
    rope_types={"linear": "", "llama3": "", "longrope": ""},
    complete=_complete_latent,
    layer=_layer,
)
DEEPSEEK_V2 = replace(  # its router differs; its GGUF files call themselves as those of V3
    DEEPSEEK_V3,
    name="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    gguf=None,
    defaults=_OF_V3
    | {"num_key_value_heads": None, "num_experts": 64, "num_experts_per_tok": None, "moe_intermediate_size": 1407}
    | {"n_shared_experts": 2, "routed_scaling_factor": 1.0, "norm_topk_prob": False, "n_group": None}
    | {"topk_group": None, "first_k_dense_replace": 0},
    allowed_values={
        **_VALUES,
        **_ALL_ROTATE,
        "norm_topk_prob": (False, None),  # which transformers ignores
        "rope_interleave": (True, None),  # likewise
        "scoring_func": ("softmax", None),
        "topk_method": ("greedy", "group_limited_greedy", None),
        "mlp_layer_types": (None,),
    },
    numbers={
        **DEEPSEEK_V3.numbers,
        "n_group": replace(_GROUPS, low=0, null=0),
        "topk_group": replace(_EXPERTS["topk_group"], low=0, null=0),
        "rope_interleave": replace(FLAG, default=True, null=True),
    },
    complete=_complete_v2,
    layer=partial(_layer, sigmoid=False),
)
GLM_FLASH = replace(  # as DEEPSEEK_V2, of GGUF files
    DEEPSEEK_V3,
    name="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    gguf=None,
    defaults=_OF_V3
    | {"num_key_value_heads": 20, "rms_norm_eps": 1e-5, "q_lora_rank": 768, "qk_nope_head_dim": 192}
    | {"v_head_dim": 256, "num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536}
    | {"routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
    nullable=frozenset(),
    allowed_values={**_VALUES, **_ALL_ROTATE, **_SIGMOID, "first_k_dense_replace": (1, None)},
    numbers=_EXPERTS | _LATENTS | {"rope_interleave": replace(FLAG, default=True)},
    complete=_complete_flash,
)
GLM_MOE = Architecture(
    name="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "attention_bias": False}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1}
    | {"norm_topk_prob": True, "first_k_dense_replace": 1},
    nullable=frozenset(),
    allowed_values={**_VALUES, **_SIGMOID, "mlp_layer_types": (None,)},
    attention_bias="attention_bias",
    numbers={**_EXPERTS, "use_qk_norm": replace(FLAG, default=False)},
    partial_rotary=True,
    complete=_complete,
    layer=partial(_layer, latent=False),
)
DEEPSEEK = (DEEPSEEK_V3, DEEPSEEK_V2, GLM_FLASH, GLM_MOE)
