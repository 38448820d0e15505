"""Dense relatives of Llama. Each family's layer function has its differences from Llama.

Granite multiplies each addition to the residual stream by a number m. Its spec instead makes the whole stream 1 / m
times as large: the embedding is divided by m, and the epsilons of norms by m squared, so that no layer multiplies.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from gpu.checkpoint import architecture
from gpu.checkpoint.architecture import PARTIAL_VALUES, Architecture, LayerSpec, RMSNormSpec
from gpu.checkpoint.config import HeaderField, ModelConfig

# Converters of Llama and its relatives interleave the halves of each head for ggml's rotation.
interleaved_in_gguf = partial(architecture.llama_layer, gguf_interleaved=True)


# Ministral 3: Llama with YaRN, and queries that grow with their positions. GGUF files call it Mistral 3.
MINISTRAL3 = Architecture(
    name="Ministral3ForCausalLM",
    model_type="ministral3",
    gguf="mistral3",
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    nullable=frozenset({"sliding_window"}),
    window_keys=frozenset({"sliding_window"}),
    query_scaling=True,
    layer=interleaved_in_gguf,
)


# Phi 3, 3.5, 4 and Phi-4-mini: Llama with fused matrices, and longrope for long contexts.
def _phi3_layer(config: ModelConfig, index: int) -> LayerSpec:
    layer, prefix, gguf = architecture.llama_layer(config, index), f"model.layers.{index}", f"blk.{index}"
    query, key, value = architecture.fused(f"{prefix}.self_attn.qkv_proj", f"{gguf}.attn_qkv", *layer.attention.qkv)
    return replace(
        layer,
        attention=replace(layer.attention, qkv=(query, key, value)),
        feed_forward=architecture.fused_network(layer.feed_forward, f"{prefix}.mlp.gate_up_proj", f"{gguf}.ffn_up"),
    )


PHI3 = Architecture(
    name="Phi3ForCausalLM",
    model_type="phi3",
    gguf="phi3",
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    allowed_values=PARTIAL_VALUES,
    nullable=frozenset({"sliding_window", "num_key_value_heads"}),
    window_keys=frozenset({"sliding_window"}),
    partial_rotary=True,
    rope_types={"su": "longrope", "yarn": "longrope", "linear": "", "llama3": ""},  # transformers refuses the last two
    layer=_phi3_layer,
)


# Granite 3.
_MULTIPLIER = HeaderField(float, 1e-6, 1e6, "", default=1.0)
_MULTIPLIERS = {
    "embedding_multiplier": replace(_MULTIPLIER, gguf="embedding_scale"),
    "residual_multiplier": replace(_MULTIPLIER, gguf="residual_scale"),
    "attention_multiplier": replace(_MULTIPLIER, gguf="attention.scale"),
    "logits_scaling": replace(_MULTIPLIER, gguf="logit_scale"),
}


def _granite_norm(norm: RMSNormSpec | None, config: ModelConfig) -> RMSNormSpec:
    assert norm is not None
    return replace(norm, eps=norm.eps / config.numbers["residual_multiplier"] ** 2)


def granite_layer(config: ModelConfig, index: int) -> LayerSpec:
    layer = interleaved_in_gguf(config, index)
    heads = replace(layer.attention.heads, scale=float(config.numbers["attention_multiplier"]))
    return replace(
        layer,
        attention_norm=_granite_norm(layer.attention_norm, config),
        attention=replace(layer.attention, heads=heads),
        feed_forward_norm=_granite_norm(layer.feed_forward_norm, config),
    )


def _granite(spec: architecture.DecoderSpec, config: ModelConfig) -> architecture.DecoderSpec:
    numbers = config.numbers
    return replace(
        spec,
        norm=_granite_norm(spec.norm, config),
        embedding_scale=numbers["embedding_multiplier"] / numbers["residual_multiplier"],
        logits_scale=1.0 / numbers["logits_scaling"],
    )


GRANITE = Architecture(
    name="GraniteForCausalLM",
    model_type="granite",
    gguf="granite",
    defaults={"max_position_embeddings": 2048},
    nullable=frozenset({"num_key_value_heads"}),
    numbers=_MULTIPLIERS,
    layer=granite_layer,
    finish=_granite,
)


# SmolLM3: Llama, where some layers have no positions.
SMOLLM3 = Architecture(
    name="SmolLM3ForCausalLM",
    model_type="smollm3",
    gguf="smollm3",
    defaults={"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    nullable=frozenset({"sliding_window", "num_key_value_heads"}),
    window_keys=frozenset({"sliding_window", "use_sliding_window", "layer_types"}),
    no_rope_interval=4,
    layer=interleaved_in_gguf,
)


# OLMo 2 and 3: norms after attention and network instead of before; query and key norms span all heads.
def _olmo_layer(config: ModelConfig, index: int) -> LayerSpec:
    layer = architecture.llama_layer(config, index)
    attention, norm = layer.attention, partial(architecture.norm_of_layer, config, index)
    query, key, _ = (part.shape[0] for part in attention.qkv)
    norms = norm("self_attn.q_norm", "attn_q_norm", query), norm("self_attn.k_norm", "attn_k_norm", key)
    is_local = attention.heads.window is not None
    return replace(
        layer,
        attention_norm=None,
        attention=replace(
            attention,
            qk_norm=norms,
            norm_together=True,
            rope=architecture.Rope(config.numbers["rope_local_base_freq"]) if is_local else attention.rope,
        ),
        attention_post_norm=norm("post_attention_layernorm", "post_attention_norm"),
        feed_forward_norm=None,
        feed_forward_post_norm=norm("post_feedforward_layernorm", "post_ffw_norm"),
    )


OLMO2 = Architecture(
    name="Olmo2ForCausalLM",
    model_type="olmo2",
    gguf="olmo2",
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    nullable=frozenset({"num_key_value_heads"}),
    qk_norm=True,
    layer=_olmo_layer,
)
OLMO3 = replace(  # layers with a window have their own rotation; its GGUF files call themselves olmo2
    OLMO2,
    name="Olmo3ForCausalLM",
    model_type="olmo3",
    gguf=None,
    defaults={**OLMO2.defaults, "rope_theta": 5e5, "sliding_window": 4096},
    nullable=frozenset({"num_key_value_heads", "sliding_window"}),
    numbers={"rope_local_base_freq": HeaderField(float, 1.0, 1e12, "", "rope.freq_base", default=5e5)},
    full_layers=4,
    window_keys=frozenset({"sliding_window", "layer_types"}),
)


# GLM-4 of 0414, and the GLM-4 before it, without norms after attention and network. Half of each head rotates.
def _glm_layer(config: ModelConfig, index: int) -> LayerSpec:
    layer, prefix = architecture.llama_layer(config, index, interleaved=True), f"model.layers.{index}.mlp.gate_up_proj"
    return replace(layer, feed_forward=architecture.fused_network(layer.feed_forward, prefix, f"blk.{index}.ffn_up"))


def _glm4_layer(config: ModelConfig, index: int) -> LayerSpec:
    norm = partial(architecture.norm_of_layer, config, index)
    return replace(
        _glm_layer(config, index),
        attention_post_norm=norm("post_self_attn_layernorm", "post_attention_norm"),
        feed_forward_post_norm=norm("post_mlp_layernorm", "post_ffw_norm"),
    )


GLM4 = Architecture(
    name="Glm4ForCausalLM",
    model_type="glm4",
    gguf="glm4",
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1.5625e-7,
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5,
    },
    allowed_values=PARTIAL_VALUES,
    attention_bias="attention_bias",
    nullable=frozenset(),
    partial_rotary=True,
    layer=_glm4_layer,
)
GLM = replace(
    GLM4,
    name="GlmForCausalLM",
    model_type="glm",
    gguf=None,
    nullable=frozenset({"num_key_value_heads"}),
    layer=_glm_layer,
)

DENSE = (MINISTRAL3, PHI3, GRANITE, SMOLLM3, OLMO2, OLMO3, GLM4, GLM)
