"""The KV cache is as large as it may be, and what cannot work says what would."""

import re
from dataclasses import replace
from typing import Any

import pytest

from engine.errors import ConfigError
from gpu.checkpoint import ModelConfig
from gpu.kv_cache import GIB, kv_cache_size

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=8192,
)
BYTES_PER_BLOCK = 2 * 2 * 2 * 16 * 4 * 16  # keys and values, layers, heads, head_dim, float32, tokens


def size(**changes: Any):
    options = {
        "element_size": 4,
        "block_size": 16,
        "max_num_seqs": 64,
        "max_model_len": None,
        "budget": 1000 * BYTES_PER_BLOCK + 5,
        "kv_cache_memory": None,
    }
    return kv_cache_size(**({"config": CONFIG} | options | changes))


def number_after(prefix: str, message: str) -> int:
    found = re.search(rf"{prefix}(\d+)", message)
    assert found, message
    return int(found[1])


def test_the_budget_is_filled_with_whole_blocks():
    chosen = size()
    assert (chosen.num_blocks, chosen.num_tokens, chosen.max_model_len) == (1000, 16_000, 8192)


def test_no_more_is_taken_than_a_full_batch_of_longest_requests_needs():
    assert size(max_num_seqs=3, max_model_len=100, budget=100 * GIB).num_blocks == 3 * 7


def test_an_explicit_size_is_taken_in_full():
    assert size(max_num_seqs=1, max_model_len=16, kv_cache_memory=500 * BYTES_PER_BLOCK).num_blocks == 500


def test_a_scale_takes_its_part_of_a_number():
    assert size(element_size=1 + 4 / 16).bytes_per_block == BYTES_PER_BLOCK * 5 // 16


def test_an_unset_context_is_lowered_to_what_fits():
    assert size(budget=10 * BYTES_PER_BLOCK).max_model_len == 160


def test_a_context_that_does_not_fit_names_one_that_does():
    with pytest.raises(ConfigError) as caught:
        size(max_model_len=4096, budget=10 * BYTES_PER_BLOCK)
    message = str(caught.value)
    assert caught.value.setting == "max_model_len"
    assert "4096" in message
    works = number_after("max_model_len=", message)
    assert size(max_model_len=works, budget=10 * BYTES_PER_BLOCK).max_model_len == works
    enough = number_after("kv_cache_memory=", message)
    assert size(max_model_len=4096, kv_cache_memory=enough).max_model_len == 4096
    with pytest.raises(ConfigError):
        size(max_model_len=works + 1, budget=10 * BYTES_PER_BLOCK)


@pytest.mark.parametrize("max_model_len", [0, -1, 8193])
def test_a_context_that_the_model_does_not_have_names_its_limit(max_model_len: int):
    with pytest.raises(ConfigError, match=rf"max_model_len is {max_model_len}: .*8,192.*max_model_len=8192 works"):
        size(max_model_len=max_model_len)


def test_memory_for_less_than_a_block_names_enough():
    with pytest.raises(ConfigError) as caught:
        size(kv_cache_memory=BYTES_PER_BLOCK - 1)
    enough = number_after("kv_cache_memory=", str(caught.value))
    assert size(kv_cache_memory=enough).max_model_len == 8192
    with pytest.raises(ConfigError):
        size(budget=-7)


def test_the_summary_reads_in_one_line():
    assert str(size(kv_cache_memory=2 * GIB)) == (
        "KV cache: 2.0 GiB, 262,144 blocks of 16 tokens: room for 4,194,304 tokens, 512.0 x the 8,192-token context"
    )
    mixed = replace(CONFIG, num_hidden_layers=4, sliding_window=64, layer_types=ModelConfig.alternating(4, 4))
    assert " blocks of 16 tokens in 1 of 4 layers each: room for " in str(size(config=mixed))
