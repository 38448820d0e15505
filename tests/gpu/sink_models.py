"""Dense models with attention sinks, and transformers' computation of them: Qwen 2, with the attention of gpt-oss."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from gpu.checkpoint import ModelConfig
from gpu.checkpoint.architecture import Architecture, LayerSpec, Part, llama_layer

NAME = "SinksForCausalLM"
_ATTENTION = "eager_with_sinks"


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    layer = llama_layer(config, index)
    name, gguf = f"model.layers.{index}.self_attn.sinks", f"blk.{index}.attn_sinks"
    sinks = Part(name, gguf, (config.num_attention_heads,), suffix="")
    return replace(layer, attention=replace(layer.attention, sinks=sinks))


FAMILY = Architecture(name=NAME, gguf="qwen2", attention_bias=True, layer=_layer)


class SinksConfig(Qwen2Config):
    model_type = "sinks"


class SinksForCausalLM(Qwen2ForCausalLM):
    """Its sinks are about as high as the scores."""

    config_class = SinksConfig

    def __init__(self, config: SinksConfig) -> None:
        super().__init__(config)
        self.set_attn_implementation(_ATTENTION)
        for layer in self.model.layers:
            layer.self_attn.sinks = torch.nn.Parameter(2 * torch.randn(config.num_attention_heads))


AttentionInterface.register(_ATTENTION, eager_attention_forward)
AttentionMaskInterface.register(_ATTENTION, eager_mask)
AutoModelForCausalLM.register(SinksConfig, SinksForCausalLM)
