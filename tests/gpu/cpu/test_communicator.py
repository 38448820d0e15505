"""A model on several ranks of the C path is the same bits as on one."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import PreTrainedConfig

from gpu.checkpoint import ModelConfig
from gpu.checkpoint.tensors import Weight
from gpu.cpu.library import Library
from gpu.kv_cache import kv_layout
from gpu.runner.runner import ModelInputs
from gpu.sharding import Layout
from gpu.weights.reading import dummy_weights
from tests.gpu.cpu.test_decoder import MODELS, Model
from tests.gpu.native_builds import needs_library
from tests.gpu.oracles import model_config
from tests.gpu.rank_processes import Weights, make_model, rank_processes, same_bits
from tests.selection import slow_except

pytestmark = [needs_library, pytest.mark.usefixtures("every_build", "sinks_family")]

LAYOUTS = {
    "tp2": Layout(tensor_parallel_size=2),
    "tp3": Layout(tensor_parallel_size=3),
    "pp3": Layout(pipeline_parallel_size=3),
    "tp2-pp2": Layout(tensor_parallel_size=2, pipeline_parallel_size=2),
}
CASES = [
    ("llama", "tp2"),
    ("llama-tied", "tp3"),  # with fewer KV heads than ranks
    ("wide-heads", "tp3"),
    ("mistral-window", "tp2"),
    ("qwen2", "tp3"),
    ("qwen3", "tp2"),
    ("sinks", "tp3"),
    ("gemma2", "tp3"),
    ("gemma3", "tp2"),
    ("mixtral", "tp3"),  # six experts, two on each rank
    ("qwen3-moe", "tp2"),
    ("gpt-oss", "tp2-pp2"),
    ("sinks", "pp3"),
    ("llama-tied", "tp2-pp2"),
    ("gemma2", "tp2-pp2"),
]
PROMPT = 40  # tokens of every request; those behind are generated ones


def random_model(oracle: PreTrainedConfig, *, quantized: bool) -> tuple[ModelConfig, Weights]:
    config = model_config(oracle)
    spread = [(name, Model._spread(name, array)) for name, array in dummy_weights(config)]
    weights: list[tuple[str, Weight]] = [
        (name, Model._quantized(name, array) if quantized else array) for name, array in spread
    ]
    return config, lambda: weights  # made here: torch cannot be used where a process was forked


def step(config: ModelConfig, *requests: tuple[int, int, int]) -> ModelInputs:
    """Some tokens of each of these requests: (number, first position, how many)."""
    counts = [count for _, _, count in requests]
    numbers_of_groups = range(kv_layout(config).num_groups)  # whose blocks are their own, as each request's are
    tables = [[np.arange(4) + 4 * (group * 3 + number) for number, _, _ in requests] for group in numbers_of_groups]
    positions = np.concatenate([np.arange(first, first + count) for _, first, count in requests])
    numbers = np.repeat([number for number, _, _ in requests], counts)
    return ModelInputs(
        input_ids=(positions * 37 + numbers * 11) % config.vocab_size,
        positions=positions,
        query_start_loc=np.cumsum([0, *counts], dtype=np.int32),
        seq_lens=np.array([first + count for _, first, count in requests], dtype=np.int32),
        block_tables=np.array(tables, dtype=np.int32),
        num_decodes=sum(count == 1 for count in counts),
        num_prompt_tokens=np.full(len(requests), PROMPT, dtype=np.int32),
    )


def assert_same(library: Library, config: ModelConfig, weights: Weights, layout: Layout, num_threads: int = 1) -> None:
    """A prompt in chunks, requests that decode, and both together."""
    one = make_model(library, config, weights, num_threads=num_threads)
    decoding = [(0, 40, 1), (1, 40, 1)]
    steps = [
        [(0, 0, 23)],
        [(0, 23, 17), (1, 0, 40)],
        decoding,
        [(0, 41, 1), (1, 41, 1), (2, 0, 33)],
        *[[(0, 42 + i, 1), (1, 42 + i, 1)] for i in range(3)],
    ]
    with rank_processes(library, config, weights, layout, num_threads=num_threads) as ranks:
        for requests in steps:
            inputs = step(config, *requests)
            expected, seen = one.forward(inputs), ranks.forward(inputs)
            assert same_bits(seen, expected), requests
            rows = np.ascontiguousarray(np.resize(expected, (70, config.hidden_size)))  # more than fit at a time
            for name in ("compute_logits", "most_likely"):
                own = getattr(one, name)(rows)
                found = ranks.last(name, rows)
                own = own if isinstance(own, tuple) else (own,)
                assert all(same_bits(np.ascontiguousarray(a), b) for a, b in zip(own, found, strict=True)), name


@pytest.mark.parametrize(("name", "layout"), slow_except(CASES, *CASES[1::3]))
def test_ranks_compute_the_bits_of_one(every_build: Library, name: str, layout: str):
    assert_same(every_build, *random_model(MODELS[name], quantized=name in ("llama", "qwen2")), LAYOUTS[layout])


def test_ranks_of_several_threads_compute_the_bits_of_one(every_build: Library):
    assert_same(every_build, *random_model(MODELS["llama"], quantized=True), LAYOUTS["tp2"], num_threads=2)
