"""Models against transformers (their definition), and their published sizes."""

from typing import Any

import pytest
import torch
import transformers
from transformers import (
    LlamaConfig,
)

from gpu.checkpoint import ModelConfig, ModelError, RopeScaling
from gpu.rotary import inverse_frequencies
from tests.gpu.deepseek_models import DEEPSEEK
from tests.gpu.gemma_models import GEMMA, vary
from tests.gpu.oracles import (
    BLOCK_SIZE,
    ORACLES,
    PROMPT,
    Runner,
    assert_logits,
    build,
    expected,
    model_config,
    prompt,
    weights_of,
    with_one_answer,
)
from tests.selection import slow_except

QUICK = [name for name in ORACLES if name not in DEEPSEEK | GEMMA or name in ("deepseek-v3", "gemma4", "gemma3n")]


@pytest.fixture(scope="module", params=slow_except(ORACLES, *QUICK))
def pair(request, sinks_family):
    """The model of transformers with its own random weights, and ours with the same."""
    torch.manual_seed(1)
    config = ORACLES[request.param]
    oracle = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    oracle = with_one_answer(oracle, 128)
    vary(oracle)
    model = build(model_config(config))
    model.load_weights(weights_of(oracle, model.config))
    return oracle, model


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


@pytest.mark.slow
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


@pytest.mark.slow
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
    with pytest.raises(ModelError, match=r"'dynamic'.*linear, llama3, yarn, longrope"):
        inverse_frequencies(8, 10000.0, RopeScaling(rope_type="dynamic", factor=4.0))


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
