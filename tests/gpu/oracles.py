"""Small random models of transformers, and ours with the same weights."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gpu.attention import TorchAttention
from gpu.checkpoint import ModelConfig, RopeScaling
from gpu.checkpoint.architecture import parts_of
from gpu.checkpoint.families.table import spec_of
from gpu.checkpoint.hf_config import config_from_hf
from gpu.checkpoint.tensors import reordered, unstacked
from gpu.kv_cache import kv_layout
from gpu.models.decoder import CausalLM
from gpu.models.state_layers import StateMetadata
from tests.gpu.deepseek_models import DEEPSEEK, DEEPSEEK_NAMES
from tests.gpu.dense_models import DENSE, DENSE_NAMES
from tests.gpu.gemma_models import GEMMA as PER_LAYER
from tests.gpu.gemma_models import GEMMA_NAMES
from tests.gpu.paging import Span, make_group_metadata, positions_of
from tests.gpu.sink_models import SinksConfig

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large, so that attention is far from uniform and mistakes show
}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ORACLES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "llama-tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama3-rope": LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE),
    "llama-linear-rope": LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "llama-wide-heads": LlamaConfig(**SMALL | {"head_dim": 16}),
    "mistral-window": MistralConfig(**SMALL, sliding_window=11),
    "mistral-full": MistralConfig(**SMALL, sliding_window=None),
    "qwen2": Qwen2Config(**SMALL),
    "qwen2-some-windows": Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=11, max_window_layers=1),
    "qwen3": Qwen3Config(**SMALL | {"head_dim": 16}),
    "sinks": SinksConfig(**SMALL, use_sliding_window=True, sliding_window=11, max_window_layers=1),
}
GEMMA = SMALL | {
    "num_hidden_layers": 6,
    "initializer_range": 0.1,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 11,
}
ORACLES |= {
    "gemma2": Gemma2Config(**GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=2.0),
    "gemma3": Gemma3TextConfig(**GEMMA | {"num_key_value_heads": 1}),
    "gemma3-scaled-rope": Gemma3TextConfig(
        **GEMMA,
        final_logit_softcapping=2.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "truncate": False,
}
QWEN3_MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}
ORACLES |= {
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=11),
    "qwen3-moe": Qwen3MoeConfig(**SMALL | QWEN3_MOE, norm_topk_prob=True),
    "qwen3-moe-some-dense": Qwen3MoeConfig(**SMALL | QWEN3_MOE, norm_topk_prob=False, mlp_only_layers=[1]),
    "gpt-oss": GptOssConfig(
        **SMALL,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=11,
        swiglu_limit=1.5,
        rope_parameters=YARN,
    ),
}
ORACLES |= DENSE | DEEPSEEK | PER_LAYER
FROM_THEIR_CONFIG = {
    **DENSE_NAMES,
    **DEEPSEEK_NAMES,
    **GEMMA_NAMES,
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
BLOCK_SIZE = 4
PROMPT = 45
# Of the largest logit, which is 2 at least. On some processors transformers' own float32 is 1e-5 of it away from its
# float64 (Gemma 3: 2.6e-5 of 5.5), as far as this code.
TOLERANCE = 1e-5


def model_config(oracle: PreTrainedConfig) -> ModelConfig:
    """What gpu.checkpoint reads from a config.json, for the architectures of this file."""
    if name := FROM_THEIR_CONFIG.get(oracle.model_type):
        return config_from_hf({**oracle.to_dict(), "architectures": [name]}, source=name)
    rope = dict(oracle.rope_parameters)
    theta, rope_type = rope.pop("rope_theta"), rope["rope_type"]
    return ModelConfig(
        architecture={
            "llama": "LlamaForCausalLM",
            "mistral": "MistralForCausalLM",
            "qwen2": "Qwen2ForCausalLM",
            "qwen3": "Qwen3ForCausalLM",
            "sinks": "SinksForCausalLM",
        }[oracle.model_type],
        vocab_size=oracle.vocab_size,
        hidden_size=oracle.hidden_size,
        intermediate_size=oracle.intermediate_size,
        num_hidden_layers=oracle.num_hidden_layers,
        num_attention_heads=oracle.num_attention_heads,
        num_key_value_heads=oracle.num_key_value_heads,
        head_dim=oracle.head_dim if hasattr(oracle, "head_dim") else oracle.hidden_size // oracle.num_attention_heads,
        max_position_embeddings=oracle.max_position_embeddings,
        rms_norm_eps=oracle.rms_norm_eps,
        rope_theta=theta,
        rope_scaling=None if rope_type == "default" else RopeScaling(**rope),
        tie_word_embeddings=oracle.tie_word_embeddings,
        attention_bias=oracle.model_type in ("qwen2", "sinks"),
        qk_norm=oracle.model_type == "qwen3",
        sliding_window=getattr(oracle, "sliding_window", None),
        layer_types=tuple(getattr(oracle, "layer_types", None) or ()),
    )


def weights_of(oracle: PreTrainedModel, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """As they are read from a checkpoint of it."""
    parts = {name: part for part in parts_of(spec_of(config)) for name in (part.weight_name, f"{part.name}.bias")}
    state = revert_weight_conversion(oracle, oracle.state_dict()) if config.num_experts else oracle.state_dict()
    for name, array in unstacked(((name, tensor.float().numpy()) for name, tensor in state.items()), config):
        if name in parts:
            rows = reordered(array, parts[name].order)
            assert isinstance(rows, np.ndarray)
            yield name, torch.tensor(rows + np.float32(parts[name].offset))


def with_one_answer(oracle: PreTrainedModel, max_model_len: int) -> PreTrainedModel:
    """Longrope as a server of contexts up to this length has it: transformers decides for each context anew."""
    rotary: Any = oracle.base_model.rotary_emb
    scaling = model_config(oracle.config).rope_scaling
    if scaling is not None and scaling.is_long(max_model_len):
        (rotary.original_inv_freq, _) = ROPE_INIT_FUNCTIONS["longrope"](oracle.config, "cpu", seq_len=max_model_len)
    return oracle


def build(config: ModelConfig, device: str = "cpu", dtype: torch.dtype = torch.float32) -> CausalLM:
    attention = partial(TorchAttention, block_size=BLOCK_SIZE)
    return CausalLM(config, dtype=dtype, device=device, max_model_len=128, attention=attention)


class Runner:
    """A model with a cache of its own, stepped by hand. Every step returns the logits of all its tokens."""

    def __init__(self, model: CausalLM, num_blocks: int = 64) -> None:
        self.model = model
        self.num_groups = kv_layout(model.config).num_groups
        self.caches = model.allocate_kv_cache(num_blocks * self.num_groups, torch.float32, torch.device("cpu"))
        for cache in self.caches:
            cache.fill_(float("nan"))
        if model.spec.state_bytes:
            self.caches += model.allocate_states(1, torch.device("cpu")).unbind(1)

    def step(self, *requests: tuple[torch.Tensor, int, list[int]]) -> list[torch.Tensor]:
        """Each request is its tokens so far, how many of them are computed, and its blocks."""
        spans = [Span(len(tokens) - computed, len(tokens), blocks) for tokens, computed, blocks in requests]
        input_ids = torch.cat([tokens[computed:] for tokens, computed, _ in requests])
        with torch.inference_mode():
            metadata: list[Any] = make_group_metadata(spans, BLOCK_SIZE, self.num_groups)
            if self.model.spec.state_bytes:  # of one request
                lengths = [span.query_len for span in spans]
                rows = torch.zeros(1, dtype=torch.int64)
                metadata.append(StateMetadata(query_lens_list=lengths, num_decodes=0, rows=rows, saves={}))
            hidden = self.model(input_ids, positions_of(spans), metadata, self.caches)
            logits = self.model.compute_logits(hidden)
        return list(logits.float().split([span.query_len for span in spans]))


def prompt(seed: int, length: int = PROMPT) -> torch.Tensor:
    return torch.randint(0, SMALL["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed))


def expected(oracle: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return oracle(tokens[None], use_cache=False).logits[0]


def assert_logits(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    bound = TOLERANCE * max(2.0, float(wanted.abs().max()))
    torch.testing.assert_close(actual, wanted, atol=bound, rtol=2 * TOLERANCE)
