"""Qwen3-Next and Qwen3.5: three of four layers are gated delta nets, the others have gated attention.

Norms multiply by 1 + w, except the norm inside the delta net. Qwen3.5 is Qwen3-Next with other projections of the delta
net, without experts or with stacked ones. Its vision part is skipped: for text, all three sections of a position have
the same angles.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from gpu.checkpoint import architecture
from gpu.checkpoint.config import EXPERTS, EXPERTS_PER_TOKEN, FIELDS, FLAG, HeaderField, ModelConfig

SORTED, TILED = "rows_are_sorted", "value_heads_are_tiled"  # numbers of configurations of GGUF files
_VALUES: dict[str, tuple[Any, ...]] = {
    **{key: values for key, values in architecture.LLAMA_VALUES.items() if key != "partial_rotary_factor"},
    "attn_output_gate": (True, None),
}
_SIZE = HeaderField(int, 1, 2**10, "elements")
# The defaults of numbers that GGUF files have are for config.json only: a GGUF file without them is refused.
_NUMBERS = {
    "linear_num_key_heads": HeaderField(int, 1, 2**11, "heads", "ssm.group_count"),
    "linear_num_value_heads": HeaderField(int, 1, 2**11, "heads", "ssm.time_step_rank"),
    "linear_key_head_dim": replace(_SIZE, gguf="ssm.state_size"),
    "linear_value_head_dim": replace(_SIZE, default=128),
    "linear_conv_kernel_dim": HeaderField(int, 2, 64, "tokens", "ssm.conv_kernel"),
    "partial_rotary_factor": HeaderField(float, 0.01, 1.0, "", default=0.25),
}
_DEFAULTS = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "head_dim": 256}
_DEFAULTS |= {"linear_conv_kernel_dim": 4, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_INNER = FIELDS["intermediate_size"]
_EXPERTS = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS_PER_TOKEN,
    "moe_intermediate_size": replace(_INNER, gguf="expert_feed_forward_length"),
    "shared_expert_intermediate_size": replace(_INNER, gguf="expert_shared_feed_forward_length"),
    "norm_topk_prob": replace(FLAG, default=True),
}
# transformers ignores these keys for Qwen3.5.
_ALL_EXPERTS: dict[str, tuple[Any, ...]] = {
    "norm_topk_prob": (True, None),
    "mlp_only_layers": ([], None),
    "decoder_sparse_step": (1, None),
}


def _layer(config: ModelConfig, index: int, *, by_key_head: bool) -> architecture.LayerSpec:
    layer, hidden = architecture.llama_layer(config, index), config.hidden_size

    def zero_centred(norm: architecture.RMSNormSpec | None) -> architecture.RMSNormSpec:
        assert norm is not None
        gguf = norm.weight.gguf.replace("ffn_norm", "post_attention_norm")
        return replace(norm, weight=replace(norm.weight, offset=1.0, gguf=gguf))

    attention: architecture.AttentionSpec | architecture.GatedDeltaSpec
    if config.has_keys(index):
        plain = layer.attention
        assert isinstance(plain, architecture.AttentionSpec)
        query, key, value = plain.qkv
        size = int(config.head_dim * config.numbers["partial_rotary_factor"])
        attention = architecture.GatedAttentionSpec(
            heads=plain.heads,
            qkv=(replace(query, shape=(2 * query.shape[0], hidden)), key, value),
            out=plain.out,
            qk_norm=plain.qk_norm and (zero_centred(plain.qk_norm[0]), zero_centred(plain.qk_norm[1])),
            rope=replace(plain.rope, size=size),
        )
    else:
        attention = _delta_net(config, index, by_key_head)
    has_experts = config.num_experts and index not in config.dense_layers
    return replace(
        layer,
        attention_norm=zero_centred(layer.attention_norm),
        attention=attention,
        feed_forward_norm=zero_centred(layer.feed_forward_norm),
        feed_forward=_experts(config, index) if has_experts else layer.feed_forward,
    )


def _delta_net(config: ModelConfig, index: int, by_key_head: bool) -> architecture.GatedDeltaSpec:
    """Return the delta net of a layer. Files with `by_key_head` have two projections, (q, k, v, z) and (b, a), grouped
    by key head; except that in GGUF files the first has its rows sorted (`SORTED`)."""
    numbers, hidden = config.numbers, config.hidden_size
    is_sorted = not by_key_head or SORTED in numbers
    key_heads, value_heads = int(numbers["linear_num_key_heads"]), int(numbers["linear_num_value_heads"])
    key_dim, value_dim = int(numbers["linear_key_head_dim"]), int(numbers["linear_value_head_dim"])
    keys, values = key_heads * key_dim, value_heads * value_dim

    def part(name: str, gguf: str, *shape: int, suffix: str = ".weight") -> architecture.Part:
        return architecture.Part(
            f"model.layers.{index}.linear_attn.{name}", f"blk.{index}.{gguf}", shape, suffix=suffix
        )

    def of_heads(name: str, gguf: str, *shape: int) -> tuple[architecture.Part, ...]:
        """Return the parts for queries, keys and values of a tensor."""
        parts = (part(f"{name}.{letter}", gguf, size, *shape) for letter, size in zip("qkv", sizes, strict=True))
        return architecture.fused(f"model.layers.{index}.linear_attn.{name}", f"blk.{index}.{gguf}", *parts)

    projections: tuple[architecture.Part, ...]
    sizes = (keys, keys, values)
    if is_sorted:
        b, a = (part(f"in_proj_{name[0]}", f"ssm_{name}", value_heads, hidden) for name in ("beta", "alpha"))
        if by_key_head:
            stack = architecture.Stack("in_proj_ba", 0, 2, in_gguf=True, run=value_heads // key_heads)
            stacks = (stack, replace(stack, start=1))
            b, a = (replace(e, gguf=f"blk.{index}.ssm_ba", stack=s) for e, s in zip((b, a), stacks, strict=True))
        projections = (
            *of_heads("in_proj_qkv", "attn_qkv", hidden),
            part("in_proj_z", "attn_gate", values, hidden),
            b,
            a,
        )
    else:
        projections = (
            part("in_proj_qkvz", "ssm_in", 2 * (keys + values), hidden),
            part("in_proj_ba", "ssm_ba", 2 * value_heads, hidden),
        )
    return architecture.GatedDeltaSpec(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        projections=projections,
        conv=of_heads("conv1d", "ssm_conv1d", 1, int(numbers["linear_conv_kernel_dim"])),
        dt_bias=part("dt_bias", "ssm_dt.bias", value_heads, suffix=""),
        a_log=part("A_log", "ssm_a", value_heads, suffix=""),
        norm=architecture.RMSNormSpec(part("norm", "ssm_norm", value_dim), config.rms_norm_eps),
        out=part("out_proj", "ssm_out", hidden, values),
        by_key_head=not is_sorted,
        tiled=TILED in numbers,
    )


def _experts(config: ModelConfig, index: int) -> architecture.MoESpec:
    inner = int(config.numbers["shared_expert_intermediate_size"])
    return architecture.with_shared_expert(architecture.stacked_experts(config, index), config, index, inner)


def _finish(spec: architecture.DecoderSpec, config: ModelConfig) -> architecture.DecoderSpec:
    assert spec.norm is not None
    return replace(spec, norm=replace(spec.norm, weight=replace(spec.norm.weight, offset=1.0)))


_COMMON: dict[str, Any] = {
    "allowed_values": _VALUES,
    "qk_norm": True,
    "state_layers": "linear_attention",
    "finish": _finish,
}
QWEN3_NEXT = architecture.Architecture(
    name="Qwen3NextForCausalLM",
    gguf="qwen3next",
    model_type="qwen3_next",
    defaults=_DEFAULTS | {"num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10},
    numbers=_NUMBERS | _EXPERTS,
    layer=partial(_layer, by_key_head=True),
    **_COMMON,
)
QWEN3_5 = architecture.Architecture(
    name="Qwen3_5ForCausalLM",
    gguf="qwen35",
    model_type="qwen3_5_text",
    defaults=_DEFAULTS | {"num_key_value_heads": 4},
    numbers=_NUMBERS,
    layer=partial(_layer, by_key_head=False),
    **_COMMON,
)
QWEN3_5_MOE = architecture.Architecture(
    name="Qwen3_5MoeForCausalLM",
    gguf="qwen35moe",
    model_type="qwen3_5_moe_text",
    # All layers have experts, so the size of a dense network is not in the files and never used.
    defaults=_DEFAULTS
    | {"num_key_value_heads": 2, "intermediate_size": 1, "num_experts": 256, "num_experts_per_tok": 8},
    numbers=_NUMBERS | _EXPERTS,
    layer=partial(_layer, by_key_head=False),
    **_COMMON | {"allowed_values": _VALUES | _ALL_EXPERTS},
)
HYBRIDS = {family.name: family for family in (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)}
for _name in ("Qwen3_5", "Qwen3_5Moe"):  # with a vision part
    HYBRIDS[f"{_name}ForConditionalGeneration"] = HYBRIDS[f"{_name}ForCausalLM"]
