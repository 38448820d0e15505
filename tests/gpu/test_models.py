"""Models against transformers (their definition), their published sizes, and checkpoints that do not fit."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
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

from gpu.attention.torch_backend import TorchAttention
from gpu.checkpoint import ModelConfig, ModelError, RopeScaling
from gpu.checkpoint.architecture import Part, parts_of
from gpu.checkpoint.families import spec_of
from gpu.checkpoint.hf_config import config_from_hf
from gpu.checkpoint.stacks import unstacked
from gpu.kv_layout import kv_layout
from gpu.layers.linear import Linear
from gpu.models import CausalLM
from gpu.rotary import inverse_frequencies
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
FROM_THEIR_CONFIG = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
BLOCK_SIZE = 4
PROMPT = 45
TOLERANCE = 2e-5  # logits are of the order of 1


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
    offsets = {f"{part.name}.weight": part.offset for part in parts_of(spec_of(config))}
    state = revert_weight_conversion(oracle, oracle.state_dict()) if config.num_experts else oracle.state_dict()
    arrays = unstacked(((name, tensor.float().numpy()) for name, tensor in state.items()), config)
    return ((name, torch.tensor(array + np.float32(offsets.get(name, 0.0)))) for name, array in arrays)


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

    def step(self, *requests: tuple[torch.Tensor, int, list[int]]) -> list[torch.Tensor]:
        """Each request is its tokens so far, how many of them are computed, and its blocks."""
        spans = [Span(len(tokens) - computed, len(tokens), blocks) for tokens, computed, blocks in requests]
        input_ids = torch.cat([tokens[computed:] for tokens, computed, _ in requests])
        with torch.inference_mode():
            metadata = make_group_metadata(spans, BLOCK_SIZE, self.num_groups)
            hidden = self.model(input_ids, positions_of(spans), metadata, self.caches)
            logits = self.model.compute_logits(hidden)
        return list(logits.float().split([span.query_len for span in spans]))


@pytest.fixture(scope="module", params=list(ORACLES))
def pair(request, sinks_family):
    """The model of transformers with its own random weights, and ours with the same."""
    torch.manual_seed(1)
    config = ORACLES[request.param]
    oracle = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.normal_(1.0, 0.3)  # their init is ones and zeros, which hides what is not applied
    model = build(model_config(config))
    model.load_weights(weights_of(oracle, model.config))
    return oracle, model


def prompt(seed: int, length: int = PROMPT) -> torch.Tensor:
    return torch.randint(0, SMALL["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed))


def expected(oracle: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return oracle(tokens[None], use_cache=False).logits[0]


def assert_logits(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual, wanted, atol=TOLERANCE, rtol=TOLERANCE)


def shuffled_blocks(seed: int, count: int = 12) -> list[int]:
    """Blocks of one request; those of different seeds do not overlap."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return [seed * count + int(i) for i in order]


def test_prefill_gives_the_logits_of_transformers(pair):
    oracle, model = pair
    tokens = prompt(0)
    (logits,) = Runner(model).step((tokens, 0, shuffled_blocks(0)))
    assert_logits(logits, expected(oracle, tokens))


def test_prefill_in_chunks_gives_the_logits_of_transformers(pair):
    oracle, model = pair
    tokens, blocks, runner = prompt(1), shuffled_blocks(0), Runner(model)
    logits = [runner.step((tokens[:end], start, blocks))[0] for start, end in ((0, 7), (7, 8), (8, 30), (30, PROMPT))]
    assert_logits(torch.cat(logits), expected(oracle, tokens))


def test_decode_token_by_token_gives_the_logits_of_transformers(pair):
    oracle, model = pair
    tokens, blocks, runner = prompt(2), shuffled_blocks(0), Runner(model)
    logits = [runner.step((tokens[:20], 0, blocks))[0]]
    logits += [runner.step((tokens[: i + 1], i, blocks))[0] for i in range(20, PROMPT)]
    assert_logits(torch.cat(logits), expected(oracle, tokens))


def test_a_request_on_cached_prefix_blocks_gives_the_logits_of_transformers(pair):
    oracle, model = pair
    runner = Runner(model)
    first, cached = prompt(3), 6 * BLOCK_SIZE
    second = torch.cat((first[:cached], prompt(4)))
    blocks = shuffled_blocks(0)
    runner.step((first, 0, blocks))
    (logits,) = runner.step((second, cached, blocks[:6] + list(range(20, 40))))
    assert_logits(logits, expected(oracle, second)[cached:])


def test_a_preempted_request_resumes_in_other_blocks_with_the_same_logits(pair):
    oracle, model = pair
    runner, tokens = Runner(model), prompt(5)
    runner.step((tokens[:30], 0, shuffled_blocks(0)))
    runner.step((tokens[:31], 30, shuffled_blocks(0)))
    runner.step((prompt(6), 0, shuffled_blocks(0)))  # another has its blocks now
    (logits,) = runner.step((tokens, 0, shuffled_blocks(1)))
    assert_logits(logits, expected(oracle, tokens))


def test_a_mixed_batch_gives_each_request_the_logits_of_transformers(pair):
    oracle, model = pair
    runner = Runner(model, num_blocks=72)
    computed = [44, 3, 20, 0, 17]  # two decodes, then chunks: one that ends, one from the start, one in the middle
    ends = [45, 4, PROMPT, PROMPT, 29]
    requests = [(prompt(10 + i), shuffled_blocks(i)) for i in range(5)]
    for (tokens, blocks), done in zip(requests, computed, strict=True):
        if done:
            runner.step((tokens[:done], 0, blocks))
    batch = [(tokens[:end], done, blocks) for (tokens, blocks), done, end in zip(requests, computed, ends, strict=True)]
    for logits, (tokens, done, _) in zip(runner.step(*batch), batch, strict=True):
        assert_logits(logits, expected(oracle, tokens)[done:])


def test_bfloat16_stays_close_to_float32(pair):
    oracle, _ = pair
    half = build(model_config(oracle.config), dtype=torch.bfloat16)
    half.load_weights(weights_of(oracle, half.config))
    runner = Runner(half)
    runner.caches = [cache.bfloat16() for cache in runner.caches]
    tokens = prompt(7)
    (logits,) = runner.step((tokens, 0, shuffled_blocks(0)))
    wanted = expected(oracle, tokens)
    assert (logits - wanted).norm() < 0.1 * wanted.norm()


# ------------------------------------------------------------------------------------------------ shapes


def shape(architecture: str, vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: Any):
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **{"head_dim": 128, "max_position_embeddings": 131072} | more,
    )


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        # Counts as the model cards and safetensors indexes of the repositories give them.
        (
            shape("LlamaForCausalLM", 49152, 576, 1536, 30, 9, 3, head_dim=64, tie_word_embeddings=True),  # SmolLM2
            134_515_008,
        ),
        (
            shape("LlamaForCausalLM", 128256, 2048, 8192, 16, 32, 8, head_dim=64, tie_word_embeddings=True),  # 3.2 1B
            1_235_814_400,
        ),
        (shape("LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8), 8_030_261_248),  # Llama 3.1 8B
        (shape("MistralForCausalLM", 32000, 4096, 14336, 32, 32, 8), 7_241_732_096),  # Mistral 7B v0.1
        (shape("Qwen2ForCausalLM", 152064, 3584, 18944, 28, 28, 4, attention_bias=True), 7_615_616_512),  # Qwen2.5 7B
        (shape("Qwen3ForCausalLM", 151936, 4096, 12288, 36, 32, 8, qk_norm=True), 8_190_735_360),  # Qwen3 8B
    ],
    ids=["SmolLM2-135M", "Llama-3.2-1B", "Llama-3.1-8B", "Mistral-7B", "Qwen2.5-7B", "Qwen3-8B"],
)
def test_published_models_have_their_published_number_of_parameters(config, parameters):
    model = build(config, device="meta", dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert not any(p.requires_grad for p in model.parameters())


def test_an_unknown_architecture_names_itself_and_what_is_supported():
    config = shape("GPT2LMHeadModel", 10, 8, 8, 1, 1, 1)
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel.*LlamaForCausalLM.*Qwen3ForCausalLM"):
        build(config)


def test_an_unknown_rope_scaling_names_itself_and_what_is_supported():
    with pytest.raises(ModelError, match=r"'longrope'.*linear, llama3, yarn"):
        inverse_frequencies(8, 10000.0, RopeScaling(rope_type="longrope", factor=4.0))


def test_llama3_frequencies_are_those_of_transformers():
    scaling: dict[str, Any] = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        hidden_size=2048, num_attention_heads=32, head_dim=64, rope_parameters=scaling | {"rope_theta": 500000.0}
    )
    wanted, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    found = torch.from_numpy(inverse_frequencies(64, 500000.0, RopeScaling(**scaling)))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


def test_rotary_memory_follows_the_served_length_not_the_checkpoints():
    model = build(shape("LlamaForCausalLM", 16, 32, 16, 1, 4, 2, head_dim=8))
    assert model.rotary.table.numel() == 2 * 128 * 8


# ------------------------------------------------------------------------------------------------ loading


@pytest.fixture
def checkpoint() -> dict[str, torch.Tensor]:
    oracle = transformers.AutoModelForCausalLM.from_config(ORACLES["qwen2"])
    return dict(oracle.state_dict())


def load(weights: Iterable[tuple[str, torch.Tensor]], name: str = "qwen2") -> CausalLM:
    model = build(model_config(ORACLES[name]))
    model.load_weights(weights)
    return model


def test_a_missing_tensor_is_named(checkpoint):
    del checkpoint["model.layers.1.self_attn.k_proj.bias"]
    with pytest.raises(ModelError, match=r"1 missing: model\.layers\.1\.self_attn\.k_proj\.bias\. Fetch"):
        load(checkpoint.items())


def test_an_unexpected_tensor_is_named(checkpoint):
    checkpoint["model.layers.3.mlp.up_proj.weight"] = torch.zeros(1)
    with pytest.raises(ModelError, match=r"1 with no place: 'model\.layers\.3\.mlp\.up_proj\.weight'\. Fetch"):
        load(checkpoint.items())


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(checkpoint):
    checkpoint["model.layers.0.self_attn.v_proj.weight"] = torch.zeros(8, 48)
    wanted = r"1 misshapen: model\.layers\.0\.self_attn\.v_proj\.weight is \[8, 48\], needs \[16, 48\]\. Fetch"
    with pytest.raises(ModelError, match=wanted):
        load(checkpoint.items())


def test_a_tensor_that_comes_twice_is_named(checkpoint):
    twice = [*checkpoint.items(), ("model.norm.weight", checkpoint["model.norm.weight"])]
    with pytest.raises(ModelError, match=r"1 given twice: model\.norm\.weight\. Fetch"):
        load(twice)


def test_all_faults_are_told_at_once_and_long_lists_are_cut(checkpoint):
    strangers = [(f"visual.blocks.{i}", torch.zeros(1)) for i in range(100)]
    del checkpoint["model.embed_tokens.weight"]
    message = r"1 missing: model\.embed_tokens\.weight; 100 with no place: 'visual\.blocks\.0', .* and 92 more\. Fetch"
    with pytest.raises(ModelError, match=message):
        load([*checkpoint.items(), *strangers])


def test_rotary_frequencies_and_a_tied_head_in_the_checkpoint_are_ignored():
    oracle = transformers.AutoModelForCausalLM.from_config(ORACLES["llama-tied"])
    weights = dict(oracle.state_dict())
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    weights["lm_head.weight"] = torch.full_like(weights["model.embed_tokens.weight"], 7.0)
    model = load(weights.items(), "llama-tied")
    assert model.lm_head is not None
    torch.testing.assert_close(model.lm_head.weight.data, weights["model.embed_tokens.weight"])


def test_weights_are_converted_to_the_dtype_of_the_model(checkpoint):
    model = build(model_config(ORACLES["qwen2"]), dtype=torch.float16)
    model.load_weights((name, tensor.double()) for name, tensor in checkpoint.items())
    merged = model.layers.get_parameter("2.feed_forward.gate_up.weight")
    assert merged.dtype == torch.float16
    assert torch.equal(merged[80:], checkpoint["model.layers.2.mlp.up_proj.weight"].half())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 64, 200])
def test_a_packed_matrix_gives_what_the_plain_one_gives(num_rows, bias):
    generator = torch.Generator().manual_seed(num_rows)
    parts = Part("a", "a", (40, 72), bias), Part("b", "b", (93, 72), bias)
    layer = Linear(*parts, dtype=torch.bfloat16, device="cpu")
    with torch.inference_mode():
        for _, slot in layer.weight_slots():
            slot.load(torch.randn(slot.shape, generator=generator))
        x = torch.randn(num_rows, 72, generator=generator).bfloat16()
        plain = layer(x)
        layer.pack()
        torch.testing.assert_close(layer(x), plain)
