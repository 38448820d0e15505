"""Mixtures of experts that are a dense model: they must say what it says. Both are made of the embedded model, whose
feed-forward networks are the experts, as copies or in slices."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from gpu.checkpoint import ModelConfig, open_model
from gpu.checkpoint.tensors import Weight
from gpu.runner.runner import WorkerOptions
from gpu.sharding import Layout
from gpu.weights.reading import floats, read_weights
from gpu.worker import Worker
from tests.golden.prompts import PROMPTS
from tests.gpu.parallel.ranks import RankExecutor
from tests.gpu.sampling_helpers import new_request
from tests.gpu.test_executor import generate
from tests.support.embedded_model import embedded_gguf

LAYERS, NUM_TOKENS, COPIES, SLICES = 30, 16, 3, 8
W = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def mixture(config: ModelConfig, experts: int, chosen: int, inner: int) -> ModelConfig:
    numbers = {"num_experts": experts, "num_experts_per_tok": chosen}
    return replace(config, architecture="MixtralForCausalLM", intermediate_size=inner, numbers=numbers)


def upcycled(weights: Iterator[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
    """Each expert is the dense network, and a random router chooses."""
    for name, weight in weights:
        layer, _, part = name.partition(".mlp.")
        for expert in range(COPIES if part else 0):
            yield f"{layer}.block_sparse_moe.experts.{expert}.{W[part.removesuffix('.weight')]}.weight", weight
        if not part:
            yield name, weight
    generator = np.random.default_rng(0)
    for index in range(LAYERS):
        yield (
            f"model.layers.{index}.block_sparse_moe.gate.weight",
            generator.normal(size=(COPIES, 576)).astype(np.float32),
        )


def sliced(weights: Iterator[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
    """Each expert is an eighth of the network; all are chosen, for an eighth each of eight times what they say."""
    for name, weight in weights:
        layer, _, part = name.partition(".mlp.")
        if not part:
            yield name, weight
            continue
        kind = part.removesuffix(".weight")
        for expert, piece in enumerate(np.split(floats(weight), SLICES, axis=int(kind == "down_proj"))):
            target = f"{layer}.block_sparse_moe.experts.{expert}.{W[kind]}.weight"
            yield target, piece * np.float32(SLICES if kind == "down_proj" else 1)
    for index in range(LAYERS):
        yield f"model.layers.{index}.block_sparse_moe.gate.weight", np.zeros((SLICES, 576), np.float32)


def say(
    dtype: str,
    change: Callable[[Iterator[tuple[str, Weight]]], Iterator[tuple[str, Weight]]] | None = None,
    shape: tuple[int, int, int] = (0, 0, 0),
) -> dict[str, list[int]]:
    """Greedy tokens of five prompts, in chunks and together."""
    files = open_model(str(embedded_gguf()))
    config, weights = files.config, read_weights(files)
    if change is not None:
        config, weights = mixture(config, *shape), change(weights)
    options = WorkerOptions(
        dtype=dtype, device="cpu", num_threads=1, max_model_len=256, max_num_seqs=8, kv_cache_memory=2**25
    )
    worker = Worker(config, weights, options)
    prompts = [files.tokenizer.encode(text).ids[:60] for text in PROMPTS[:5]]
    requests = [
        new_request(f"r{i}", tokens, block_ids=[*range(6 * i, 6 * i + 6)], temperature=0.0)
        for i, tokens in enumerate(prompts)
    ]
    executor = RankExecutor(worker, Layout(), [])
    said: dict[str, list[int]] = generate(executor, requests, chunk=24, num_tokens=NUM_TOKENS)  # type: ignore[arg-type]
    worker.shutdown()
    return said


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "chosen"), [("float32", 2), ("auto", 1)], ids=["torch", "library"])
def test_experts_that_are_copies_of_a_network_say_what_it_says(dtype: str, chosen: int) -> None:
    """The library rounds activations to bfloat16, so the last bit of a sum of shares may decide a close call: there one
    expert has all of it, and every bit is the same."""
    assert say(dtype, upcycled, (COPIES, chosen, 1536)) == say(dtype)


@pytest.mark.slow
def test_experts_that_are_slices_of_a_network_say_what_it_says() -> None:
    assert say("float32", sliced, (SLICES, SLICES, 1536 // SLICES)) == say("float32")
