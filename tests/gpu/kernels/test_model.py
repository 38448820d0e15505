"""A whole model on the kernels, beside the same model on plain torch: what is wired is what was tested."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from gpu.attention import TorchAttention, TritonAttention
from gpu.checkpoint import ModelConfig
from gpu.checkpoint.tensors import tensor_shapes
from gpu.kernels.dispatch import on_triton
from gpu.kv_cache import kv_layout
from gpu.models.decoder import CausalLM
from tests.gpu.deepseek_models import DEEPSEEK
from tests.gpu.dense_models import DENSE
from tests.gpu.oracles import model_config
from tests.gpu.paging import Span, make_group_metadata, positions_of
from tests.selection import slow_except

BLOCK_SIZE = 4


def config_of(architecture: str, **more: Any) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        vocab_size=120,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        **more,
    )


def build(config: ModelConfig, backend: type) -> CausalLM:
    attention = partial(backend, block_size=BLOCK_SIZE)
    model = CausalLM(config, dtype=torch.float32, device="cpu", max_model_len=128, attention=attention)
    generator = torch.Generator().manual_seed(0)
    model.load_weights(
        (name, torch.randn(size, generator=generator) * 0.3) for name, size in tensor_shapes(config).items()
    )
    return model


STEPS = [
    [Span(11, 11, [3, 1, 7])],
    [Span(1, 12, [3, 1, 7]), Span(6, 6, [0, 5])],
    [Span(1, 13, [3, 1, 7, 2]), Span(1, 7, [0, 5]), Span(5, 5, [4, 6])],
]


@torch.inference_mode()
def logits_of(model: CausalLM, kernels_expected: bool) -> list[torch.Tensor]:
    num_groups = kv_layout(model.config).num_groups
    caches = model.allocate_kv_cache(8 * num_groups, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    results = []
    for spans in STEPS:
        tokens = torch.randint(0, 97, (sum(span.query_len for span in spans),), generator=generator)
        assert on_triton(tokens) == kernels_expected
        hidden = model(tokens, positions_of(spans), make_group_metadata(spans, BLOCK_SIZE, num_groups), caches)
        results.append(model.compute_logits(hidden))
    return results


@pytest.fixture(scope="module")
def wanted(sinks_family):
    """Logits on plain torch, made before any test has turned kernels on."""
    return {name: logits_of(build(config, TorchAttention), kernels_expected=False) for name, config in CONFIGS.items()}


WINDOWS = ("sliding_attention", "full_attention")
CONFIGS = {
    "llama": config_of("LlamaForCausalLM", tie_word_embeddings=True),
    "mistral": config_of("MistralForCausalLM", sliding_window=7),
    "qwen2": config_of("Qwen2ForCausalLM", attention_bias=True),
    "qwen3": config_of("Qwen3ForCausalLM", qk_norm=True),
    "gemma2": config_of(
        "Gemma2ForCausalLM", sliding_window=7, layer_types=WINDOWS, numbers={"attn_logit_softcapping": 2.0}
    ),
    "gemma3": config_of(
        "Gemma3ForCausalLM",
        sliding_window=7,
        layer_types=WINDOWS,
        numbers={"rope_local_base_freq": 100.0},
        qk_norm=True,
    ),
    "sinks": config_of("SinksForCausalLM", sliding_window=7, layer_types=WINDOWS, attention_bias=True),
}
SOME = ("ministral3", "phi4-mini-long", "granite", "smollm3-window", "olmo3", "glm4", "qwen2-moe")
CONFIGS |= {name: replace(model_config(DENSE[name]), num_hidden_layers=2, layer_types=WINDOWS) for name in SOME}
CONFIGS["glm-moe"] = replace(model_config(DEEPSEEK["glm-moe"]), num_hidden_layers=2, layer_types=WINDOWS)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(CONFIGS, "llama", "gemma2", "sinks"))
def test_a_model_on_the_kernels_gives_the_logits_of_plain_torch(name, wanted, form):
    model = build(CONFIGS[name], TritonAttention)
    for actual, expected in zip(logits_of(model, kernels_expected=form == "kernel"), wanted[name], strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)
