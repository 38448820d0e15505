"""Thirty prompts, greedy, in every layout that one engine or several can have, by every executor: served over HTTP, and
token for token what one process says. On Ray each rank has a machine of its own, as far as Ray can tell; where the
library computes, each stage."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gpu.checkpoint import open_model
from gpu.weights.reading import floats, read_weights
from tests.golden.prompts import PROMPTS, chat
from tests.golden.test_experts_of_a_dense_model import COPIES, upcycled
from tests.integration.cluster.cluster import RayCluster, cluster
from tests.support import harness
from tests.support.embedded_model import embedded_gguf
from tests.support.harness import MODEL, Server

pytestmark = [pytest.mark.slow, pytest.mark.storm]

SUBJECTS = ["rivers", "bread", "the moon", "iron", "bees", "chess", "salt", "violins", "maps", "glass"]
THIRTY = [*PROMPTS, *(chat(f"Tell me of {subject}.") for subject in SUBJECTS), *(f"About {each}:" for each in SUBJECTS)]
PATIENCE = 600.0  # seconds for a start, or for an answer, of four ranks that share a busy machine

TP, PP, DP, EP = "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel"
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 1": {},
    "TP 2": {TP: 2},  # of 9 query and 3 KV heads
    "TP 3": {TP: 3},
    "PP 2": {PP: 2},
    "PP 3": {PP: 3},
    "TP 2, PP 2": {TP: 2, PP: 2},
    "DP 2": {DP: 2},
    "EP 2": {TP: 2, EP: True},
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with several networks in each layer that differ in how much they say."""
    files = open_model(str(embedded_gguf()))
    directory = tmp_path_factory.mktemp("mixture")
    (directory / "tokenizer.json").write_text(files.tokenizer.to_str())
    config, tensors = files.config, {}
    for name, weight in upcycled(read_weights(files)):
        matrix = name.rpartition(".experts.")[2]
        share = 1 + int(matrix[0]) / COPIES if matrix.endswith(".w2.weight") else 1
        tensors[name] = (torch.tensor(floats(weight)) * share).to(torch.bfloat16)
    save_file(tensors, directory / "model.safetensors")
    names = ["hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads"]
    names += ["head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "vocab_size"]
    shape = {name: getattr(config, name) for name in names} | {"num_local_experts": COPIES, "num_experts_per_tok": 2}
    rest = {"architectures": ["MixtralForCausalLM"], "torch_dtype": "bfloat16", "sliding_window": None}
    eos = {"bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids)}
    (directory / "config.json").write_text(json.dumps(shape | rest | eos))
    return directory


def say(ray: str | None = None, **settings: Any) -> list[list[int]]:
    """What a server says to each of the prompts. `ray` is a cluster's address."""
    room: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 32, "kv_cache_memory": "512MiB", "device": "cpu"}
    server = Server(**(room | settings))
    if ray is not None:
        server.environment |= {"RAY_ADDRESS": ray}
    body = {"max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
    with server:
        choices = server.wait_ready().complete(THIRTY, **body)["choices"]
        return [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]


@cache
def whole(model: Path | str, dtype: str) -> list[list[int]]:
    said = say(model=model, dtype=dtype)
    assert len(said) == 30
    assert len({*map(tuple, said)}) > 20, "the prompts are answered, not repeated"
    return said


@pytest.fixture(scope="module")
def clusters() -> Iterator[Callable[..., RayCluster]]:
    """By the cores of their machines."""
    with ExitStack() as stack:
        yield cache(lambda *cores: stack.enter_context(cluster(*cores)))


def machines_for(dtype: str, layout: str) -> tuple[int, ...]:
    """The library's tensor ranks have to be on one machine."""
    tensor, stages = LAYOUTS[layout].get(TP, 1), LAYOUTS[layout].get(PP, 1)
    return (tensor,) * stages if dtype == "auto" and tensor > 1 else (1, 1, 1, 1)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["auto", "float32"])  # the library, torch
@pytest.mark.parametrize("executor", ["mp", "ray"])
def test_all_tokens_are_those_of_one_process(
    executor: str,
    dtype: str,
    layout: str,
    mixture: Path,
    clusters: Callable[..., RayCluster],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(harness, "TIMEOUT", PATIENCE)
    settings: dict[str, Any] = {"model": mixture if layout.startswith("EP") else MODEL, "dtype": dtype}
    expected = whole(**settings)
    ray = clusters(*machines_for(dtype, layout)).address if executor == "ray" else None
    assert say(ray, executor=executor, **settings, **LAYOUTS[layout]) == expected
