"""The text models of Gemma 2 and 3. `_layer` and `_finish` have the differences from Llama.

Layers with and without a window alternate. GGUF files and older config.json files lack the pattern: by default, every
second layer of Gemma 2 and every sixth of Gemma 3 has no window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from gpu.checkpoint import architecture
from gpu.checkpoint.config import HeaderField, ModelConfig

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
