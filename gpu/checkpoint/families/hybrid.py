"""LFM2, with short convolutions, and Granite 4, with Mamba 2: hybrids in which some layers have attention."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from gpu.checkpoint import architecture
from gpu.checkpoint.config import EXPERTS, EXPERTS_PER_TOKEN, FIELDS, FLAG, HeaderField, ModelConfig
from gpu.checkpoint.families.dense import GRANITE, granite_layer

_TAPS = HeaderField(int, 2, 64, "tokens")  # of a convolution


def _part(index: int, name: str, gguf: str, *shape: int, **more: Any) -> architecture.Part:
    return architecture.Part(f"model.layers.{index}.{name}", f"blk.{index}.{gguf}", shape, **more)


# LFM2. Its files name some sizes in several ways.
def _lfm2_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with this project's keys, and with the network's size as transformers adjusts it."""
    inner = values.get("block_ff_dim", values.get("intermediate_size", 12288))
    factor, unit = values.get("block_ffn_dim_multiplier", 1.0), values.get("block_multiple_of", 256)
    are_sizes = all(type(each) is int and 0 < each < 2**24 for each in (inner, unit))
    if values.get("block_auto_adjust_ff_dim", True) and are_sizes and type(factor) in (int, float) and 0 < factor < 64:
        inner = math.ceil(int(factor * (2 * inner // 3)) / unit) * unit
    names = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"}
    named = {ours: values[theirs] for theirs, ours in names.items() if theirs in values}
    return {**values, "rms_norm_eps": 1e-5, **named, "intermediate_size": inner}


def _lfm2_layer(config: ModelConfig, index: int) -> architecture.LayerSpec:
    layer, hidden, prefix = architecture.llama_layer(config, index), config.hidden_size, f"model.layers.{index}"
    taps, bias = int(config.numbers["conv_L_cache"]), bool(config.numbers["conv_bias"])
    plain, network, norm = layer.attention, layer.feed_forward, partial(architecture.norm_of_layer, config, index)
    assert isinstance(network, architecture.SwiGLUSpec)
    attention: architecture.AttentionSpec | architecture.StateSpec
    if config.has_keys(index):
        norms = [norm(f"self_attn.{letter}_layernorm", f"attn_{letter}_norm", config.head_dim) for letter in "qk"]
        out = replace(plain.out, name=f"{prefix}.self_attn.out_proj")
        attention = replace(plain, qk_norm=(norms[0], norms[1]), out=out)
    else:
        attention = architecture.ShortConvSpec(
            projections=(_part(index, "conv.in_proj", "shortconv.in_proj", 3 * hidden, hidden, bias=bias),),
            conv=(_part(index, "conv.conv", "shortconv.conv", hidden, 1, taps, bias=bias),),
            out=_part(index, "conv.out_proj", "shortconv.out_proj", hidden, hidden, bias=bias),
        )
    return replace(
        layer,
        attention_norm=norm("operator_norm", "attn_norm"),
        attention=attention,
        feed_forward_norm=norm("ffn_norm", "ffn_norm"),
        feed_forward=architecture.SwiGLUSpec(
            gate=replace(network.gate, name=f"{prefix}.feed_forward.w1"),
            up=replace(network.up, name=f"{prefix}.feed_forward.w3"),
            down=replace(network.down, name=f"{prefix}.feed_forward.w2"),
        ),
    )


def _lfm2(spec: architecture.DecoderSpec, _: ModelConfig) -> architecture.DecoderSpec:
    assert spec.norm is not None
    norm = replace(spec.norm.weight, name="model.embedding_norm", gguf="token_embd_norm")
    return replace(spec, norm=replace(spec.norm, weight=norm))


LFM2 = architecture.Architecture(
    name="Lfm2ForCausalLM",
    model_type="lfm2",
    gguf="lfm2",
    defaults={"num_key_value_heads": 8, "rope_theta": 1e6, "tie_word_embeddings": True, "conv_L_cache": 3},
    nullable=frozenset(),
    numbers={
        "conv_L_cache": replace(_TAPS, gguf="shortconv.l_cache"),
        "conv_bias": replace(FLAG, default=False),
        "block_auto_adjust_ff_dim": replace(FLAG, default=True),
        "block_multiple_of": HeaderField(int, 1, 2**24 - 1, "elements", default=256),
        "block_ffn_dim_multiplier": HeaderField(float, 1e-6, 63.0, "times", default=1.0),
    },
    prepare=_lfm2_values,
    state_layers="conv",
    layer=_lfm2_layer,
    finish=_lfm2,
)


# LFM2 with experts in all layers but the first. Its router is DeepSeek V3's without groups.
def _lfm2_moe_values(values: dict[str, Any]) -> dict[str, Any]:
    kinds, inner = values.get("layer_types") or [], values.get("intermediate_size", 7168)
    return _lfm2_values(values) | {"layer_types": kinds, "full_attn_idxs": None, "intermediate_size": inner}


def _lfm2_moe_layer(config: ModelConfig, index: int) -> architecture.LayerSpec:
    layer, numbers = _lfm2_layer(config, index), config.numbers
    if index < numbers["num_dense_layers"]:
        return layer
    experts = architecture.mixture_of_experts(
        config,
        index,
        router="feed_forward.gate",
        networks=("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3", "feed_forward.experts.{}.w2"),
        inner=int(numbers["moe_intermediate_size"]),
        normalized=bool(numbers["norm_topk_prob"]),
    )
    bias = _part(index, "feed_forward.expert_bias", "exp_probs_b.bias", config.num_experts, suffix="")
    scale = float(numbers["routed_scaling_factor"])
    grouped = architecture.GroupedMoESpec(**vars(experts), correction=bias, num_groups=1, top_groups=1, scale=scale)
    return replace(layer, feed_forward=grouped)


LFM2_MOE = replace(
    LFM2,
    name="Lfm2MoeForCausalLM",
    model_type="lfm2_moe",
    gguf="lfm2moe",
    defaults={**LFM2.defaults, "num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2}
    | {"moe_intermediate_size": 1792},
    allowed_values={**architecture.LLAMA_VALUES, "use_expert_bias": (True, None)},
    numbers={
        **{name: LFM2.numbers[name] for name in ("conv_L_cache", "conv_bias")},
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "moe_intermediate_size": replace(FIELDS["intermediate_size"], gguf="expert_feed_forward_length"),
        "num_dense_layers": HeaderField(int, 0, 2**10, "layers", "leading_dense_block_count"),
        "norm_topk_prob": replace(FLAG, default=True),
        "routed_scaling_factor": HeaderField(float, 1e-6, 1e6, "times", "expert_weights_scale", default=1.0),
    },
    prepare=_lfm2_moe_values,
    layer=_lfm2_moe_layer,
)


# Granite 4: Mamba 2, or attention mostly without positions; a network for all tokens, and experts in some models.
def _granite_4_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with this project's keys."""
    head, kinds = values.get("mamba_d_head", "auto"), values.get("layers_block_type", values.get("layer_types"))
    return {
        "time_step_limit": _ANY_STEP[0],
        **values,
        "intermediate_size": values.get("shared_intermediate_size", 1024),
        "moe_intermediate_size": values.get("intermediate_size", 11008),
        "mamba_d_head": 0 if head == "auto" else head,
        "layer_types": [] if kinds is None else kinds,  # missing: all layers are Mamba, which is refused
    }


def _granite_4_layer(config: ModelConfig, index: int) -> architecture.LayerSpec:
    layer, prefix = granite_layer(config, index), f"model.layers.{index}"
    if not config.has_keys(index):
        layer = replace(layer, attention=_mamba(config, index))
    shared = architecture.fused_network(layer.feed_forward, f"{prefix}.shared_mlp.input_linear", None)
    shared = replace(shared, down=replace(shared.down, name=f"{prefix}.shared_mlp.output_linear"))
    if not config.num_experts:
        return replace(layer, feed_forward=shared)
    inner = int(config.numbers["moe_intermediate_size"])
    gate = architecture.Stack("block_sparse_moe.input_linear.weight", stop=inner, outputs_first=True)
    down = architecture.Stack("block_sparse_moe.output_linear.weight", outputs_first=True)
    experts = architecture.mixture_of_experts(
        config,
        index,
        router="block_sparse_moe.router.layer",
        inner=inner,
        normalized=True,
        stacks=(gate, replace(gate, start=inner, stop=None), down),
    )
    parts = {name: replace(part, gguf=f"{part.gguf}_shexp") for name, part in vars(shared).items()}
    return replace(layer, feed_forward=replace(experts, shared=architecture.SwiGLUSpec(**parts)))


def _mamba(config: ModelConfig, index: int) -> architecture.Mamba2Spec:
    numbers, hidden = {name: int(number) for name, number in config.numbers.items()}, config.hidden_size
    heads, groups, state_dim = numbers["mamba_n_heads"], numbers["mamba_n_groups"], numbers["mamba_d_state"]
    inner, bias = numbers["mamba_expand"] * hidden, bool(numbers["mamba_proj_bias"])
    channels = inner + 2 * groups * state_dim
    conv = _part(index, "mamba.conv1d", "ssm_conv1d", channels, 1, numbers["mamba_d_conv"])
    return architecture.Mamba2Spec(
        projections=(_part(index, "mamba.in_proj", "ssm_in", inner + channels + heads, hidden, bias=bias),),
        conv=(replace(conv, bias=bool(numbers["mamba_conv_bias"])),),
        out=_part(index, "mamba.out_proj", "ssm_out", hidden, inner, bias=bias),
        heads=heads,
        head_dim=inner // heads,
        groups=groups,
        state_dim=state_dim,
        dt_bias=_part(index, "mamba.dt_bias", "ssm_dt.bias", heads, suffix=""),
        a_log=_part(index, "mamba.A_log", "ssm_a", heads, suffix=""),
        d=_part(index, "mamba.D", "ssm_d", heads, suffix=""),
        norm=architecture.norm_of_layer(config, index, "mamba.norm", "ssm_norm", inner),
    )


_ANY_STEP = [0.0, math.inf], [0.0, {"__float__": "Infinity"}]  # as JSON, and as transformers writes it
GRANITE_4 = replace(
    GRANITE,
    name="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    gguf="granitehybrid",
    allowed_values={
        **architecture.LLAMA_VALUES,
        "position_embedding_type": ("rope", "nope", None),
        "time_step_limit": _ANY_STEP,
    },
    numbers={
        **GRANITE.numbers,
        "num_experts": replace(EXPERTS, low=0, default=8),
        "num_experts_per_tok": replace(EXPERTS_PER_TOKEN, default=2),
        "moe_intermediate_size": FIELDS["intermediate_size"],
        "mamba_n_heads": HeaderField(int, 1, 2**11, "heads", "ssm.time_step_rank", default=128),
        "mamba_n_groups": HeaderField(int, 1, 2**11, "groups", "ssm.group_count", default=1),
        "mamba_d_head": HeaderField(int, 0, 2**10, "elements", default=0),
        "mamba_d_state": HeaderField(int, 1, 2**10, "elements", "ssm.state_size", default=256),
        "mamba_d_conv": replace(_TAPS, gguf="ssm.conv_kernel", default=4),
        "mamba_expand": HeaderField(int, 1, 64, "times", default=2),
        "mamba_conv_bias": replace(FLAG, default=True),
        "mamba_proj_bias": replace(FLAG, default=False),
    },
    prepare=_granite_4_values,
    state_layers="linear_attention",
    layer=_granite_4_layer,
)
