"""All families by their names in files, with their specifications."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from gpu.checkpoint import architecture
from gpu.checkpoint.config import EXPERTS, EXPERTS_PER_TOKEN, FIELDS, FLAG, HeaderField, ModelConfig, ModelError
from gpu.checkpoint.families.deepseek import DEEPSEEK
from gpu.checkpoint.families.dense import DENSE, interleaved_in_gguf
from gpu.checkpoint.families.gemma import GEMMA2, GEMMA3, GEMMA3N, GEMMA4
from gpu.checkpoint.families.hybrid import GRANITE_4, LFM2, LFM2_MOE
from gpu.checkpoint.families.qwen_hybrid import HYBRIDS


def _gpt_oss_layer(config: ModelConfig, index: int) -> architecture.LayerSpec:
    """Return a layer of gpt-oss. Checkpoints stack its experts, in bfloat16 or MXFP4; rows of gate and up alternate."""
    layer = architecture.llama_layer(config, index)
    attention, norm = layer.attention, layer.feed_forward_norm
    assert norm is not None
    in_hf, in_gguf = f"model.layers.{index}.self_attn.sinks", f"blk.{index}.attn_sinks"
    sinks = architecture.Part(in_hf, in_gguf, (attention.heads.query,), suffix="")
    experts = architecture.mixture_of_experts(
        config,
        index,
        router="mlp.router",
        inner=config.intermediate_size,
        normalized=True,
        bias=True,
        stacks=(
            architecture.Stack("mlp.experts.gate_up_proj", 0, 2),
            architecture.Stack("mlp.experts.gate_up_proj", 1, 2),
            architecture.Stack("mlp.experts.down_proj"),
        ),
        clamp=(config.numbers["swiglu_alpha"], config.numbers["swiglu_limit"]),
    )
    return replace(
        layer,
        attention=replace(attention, sinks=sinks, out=replace(attention.out, bias=config.attention_bias)),
        feed_forward_norm=replace(norm, weight=replace(norm.weight, gguf=f"blk.{index}.post_attention_norm")),
        feed_forward=experts,
    )


GPT_OSS = architecture.Architecture(
    name="GptOssForCausalLM",
    gguf="gpt-oss",
    model_type="gpt_oss",
    defaults={
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    allowed_values={**architecture.LLAMA_VALUES, "attention_bias": (True, None), "sliding_window_pattern": (2, None)},
    attention_bias=True,
    numbers={
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "swiglu_alpha": HeaderField(float, 1e-3, 1e3, "", default=1.702),
        "swiglu_limit": HeaderField(float, 1e-3, 1e6, "", default=7.0),
    },
    quantizations=frozenset({"mxfp4"}),
    yarn_truncate=False,
    full_layers=2,
    window_keys=frozenset({"sliding_window", "layer_types"}),
    layer=_gpt_oss_layer,
)


# Qwen 3 with experts in all layers, except those that config.json excludes.
def _qwen3_moe_layer(config: ModelConfig, index: int) -> architecture.LayerSpec:
    layer = architecture.llama_layer(config, index)
    if index in config.dense_layers:
        return layer
    experts = architecture.mixture_of_experts(
        config,
        index,
        router="mlp.gate",
        inner=int(config.numbers["moe_intermediate_size"]),
        normalized=bool(config.numbers["norm_topk_prob"]),
    )
    return replace(layer, feed_forward=experts)


QWEN3_MOE = architecture.Architecture(
    name="Qwen3MoeForCausalLM",
    gguf="qwen3moe",
    model_type="qwen3_moe",
    defaults={"norm_topk_prob": False, "num_key_value_heads": 4, "sliding_window": 4096},
    window_keys=frozenset({"sliding_window", "use_sliding_window"}),  # all layers have the window
    qk_norm=True,
    numbers={
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "moe_intermediate_size": replace(FIELDS["intermediate_size"], gguf="expert_feed_forward_length"),
        "norm_topk_prob": replace(FLAG, gguf="expert_weights_norm", default=True),
    },
    layer=_qwen3_moe_layer,
)


# Qwen 2 with experts: some chosen by the router, and one shared by all tokens.
def _qwen2_moe_layer(config: ModelConfig, index: int) -> architecture.LayerSpec:
    layer = _qwen3_moe_layer(config, index)
    if index in config.dense_layers:
        return layer
    assert isinstance(layer.feed_forward, architecture.MoESpec)
    inner = int(config.numbers["shared_expert_intermediate_size"])
    return replace(layer, feed_forward=architecture.with_shared_expert(layer.feed_forward, config, index, inner))


QWEN2_MOE = replace(
    QWEN3_MOE,
    name="Qwen2MoeForCausalLM",
    gguf="qwen2moe",
    model_type="qwen2_moe",
    defaults={"norm_topk_prob": False, "num_key_value_heads": 16},
    allowed_values={**architecture.LLAMA_VALUES, "use_sliding_window": (False, None)},
    attention_bias="qkv_bias",
    qk_norm=False,
    window_keys=frozenset({"layer_types", "use_sliding_window", "sliding_window"}),
    nullable=frozenset({"sliding_window", "num_key_value_heads"}),
    numbers={
        **QWEN3_MOE.numbers,
        "norm_topk_prob": replace(FLAG, gguf="expert_weights_norm", default=False),
        "shared_expert_intermediate_size": replace(
            FIELDS["intermediate_size"], gguf="expert_shared_feed_forward_length"
        ),
    },
    layer=_qwen2_moe_layer,
)


# Mixtral: Mistral with experts in every layer. Its GGUF files call themselves llama.
def _mixtral_layer(config: ModelConfig, index: int) -> architecture.LayerSpec:
    experts = architecture.mixture_of_experts(
        config,
        index,
        router="block_sparse_moe.gate",
        networks=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3", "block_sparse_moe.experts.{}.w2"),
        inner=config.intermediate_size,
        normalized=True,
    )
    return replace(interleaved_in_gguf(config, index), feed_forward=experts)


MIXTRAL = architecture.Architecture(
    name="MixtralForCausalLM",
    model_type="mixtral",
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    nullable=frozenset({"sliding_window", "head_dim"}),
    window_keys=frozenset({"sliding_window"}),
    numbers={"num_experts": EXPERTS, "num_experts_per_tok": EXPERTS_PER_TOKEN},
    layer=_mixtral_layer,
)


# Qwen 2 and 2.5, with biases on queries, keys and values.
WINDOW_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28}
WINDOW_KEYS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})

QWEN2 = architecture.Architecture(
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    gguf="qwen2",
    defaults={"num_key_value_heads": 32, **WINDOW_DEFAULTS},
    attention_bias=True,
    nullable=frozenset({"sliding_window", "num_key_value_heads"}),
    window_keys=WINDOW_KEYS,
)


# Qwen 3, with norms on queries and keys.
QWEN3 = architecture.Architecture(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    gguf="qwen3",
    defaults={"head_dim": 128, "num_key_value_heads": 32, **WINDOW_DEFAULTS},
    qk_norm=True,
    nullable=frozenset({"sliding_window", "num_key_value_heads"}),
    window_keys=WINDOW_KEYS,
)


# Llama, and the many that took over its shape: SmolLM2, TinyLlama, DeepSeek's distillates.
LLAMA = architecture.Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    gguf="llama",
    nullable=frozenset({"head_dim", "num_key_value_heads"}),
    layer=interleaved_in_gguf,
)


# Mistral, with a sliding window. Its GGUF files call themselves llama.
MISTRAL = architecture.Architecture(
    name="MistralForCausalLM",
    model_type="mistral",
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    nullable=frozenset({"sliding_window", "head_dim"}),
    window_keys=frozenset({"sliding_window"}),
)


_GEMMA = (GEMMA2, GEMMA3, GEMMA3N, GEMMA4)
_FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, *_GEMMA, MIXTRAL, QWEN3_MOE, GPT_OSS, QWEN2_MOE, *DENSE, *DEEPSEEK)
FAMILIES: dict[str, architecture.Architecture] = {family.name: family for family in _FAMILIES}
FAMILIES |= HYBRIDS | {family.name: family for family in (GRANITE_4, LFM2, LFM2_MOE)}
# Vision models, of which only the text part is served. The text part's own model_type wins over this table.
FAMILIES |= {"Gemma3ForConditionalGeneration": GEMMA3, "Mistral3ForConditionalGeneration": MISTRAL}
FAMILIES |= {"Gemma3nForConditionalGeneration": GEMMA3N, "Gemma4ForConditionalGeneration": GEMMA4}


def spec_of(config: ModelConfig) -> architecture.DecoderSpec:
    """Return the specification of a model. Raises ModelError for an architecture that is not supported."""
    if config.encoder is not None:
        return cast(architecture.DecoderSpec, config.encoder)
    if config.transformers_dir is not None:
        return architecture.foreign_spec(config)
    if config.architecture not in FAMILIES:
        raise ModelError(f"Architecture {config.architecture!r} is not supported; supported are {', '.join(FAMILIES)}.")
    return FAMILIES[config.architecture].spec(config)
