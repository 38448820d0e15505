"""Ranks that have parts of a model say what one says that has all of it: real processes, with gloo between them."""

import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ErrorInWords, RankLost
from gpu.checkpoint import ModelConfig
from gpu.device.graphs import LARGEST
from gpu.kv_cache import kv_cache_size, kv_layout
from gpu.model_loader import rank_spec
from gpu.models import blocks
from gpu.models.communicators import SharedTensors
from gpu.runner.runner import WorkerOptions
from gpu.sharding import Layout
from tests.golden.histories import small_model
from tests.gpu.deepseek_models import OWN_NAMES
from tests.gpu.native_builds import needs_library
from tests.gpu.parallel.ranks import (
    PROCESSES,
    SECONDS,
    Case,
    Join,
    RankExecutor,
    join_gloo,
    join_memory,
    load,
    processes,
    run,
)
from tests.gpu.sampling_helpers import new_request
from tests.gpu.test_executor import generate, prompts
from tests.support.embedded_model import embedded_gguf

UNEVEN = {"num_attention_heads": 9, "num_key_value_heads": 3}
GEMMA = {
    "head_dim": 16,
    "tie_word_embeddings": True,
    "sliding_window": 11,
    "layer_types": ModelConfig.alternating(3, 2),
    "numbers": {"query_pre_attn_scalar": 24.0, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2}
MIXTURES: dict[str, ModelConfig] = {
    "qwen3-moe": small_model(
        architecture="Qwen3MoeForCausalLM",
        qk_norm=True,
        dense_layers=(1,),
        numbers=EXPERTS | {"moe_intermediate_size": 48, "norm_topk_prob": False},
    ),
    "qwen2-moe": small_model(
        architecture="Qwen2MoeForCausalLM",
        attention_bias=True,
        numbers=EXPERTS | {"moe_intermediate_size": 48, "norm_topk_prob": True, "shared_expert_intermediate_size": 48},
    ),
    "deepseek-v3": small_model(architecture="DeepseekV3ForCausalLM", **OWN_NAMES),
    "deepseek-v2": small_model(architecture="DeepseekV2ForCausalLM", **OWN_NAMES),
    "gpt-oss": small_model(
        architecture="GptOssForCausalLM",
        attention_bias=True,
        sliding_window=11,
        layer_types=ModelConfig.alternating(3, 2),
        numbers=EXPERTS | {"swiglu_alpha": 1.702, "swiglu_limit": 1.5},
    ),
}
MODELS: dict[str, ModelConfig] = {
    "llama": small_model(**UNEVEN),
    "llama-tied": small_model(tie_word_embeddings=True),  # 2 KV heads: three ranks share them
    "qwen2": small_model(architecture="Qwen2ForCausalLM", attention_bias=True),
    "qwen3": small_model(architecture="Qwen3ForCausalLM", qk_norm=True, **UNEVEN),
    "gemma2": small_model(architecture="Gemma2ForCausalLM", **GEMMA),
    **MIXTURES,
}
OPTIONS = WorkerOptions(
    dtype="float32", device="cpu", block_size=4, num_threads=1, max_num_seqs=8, kv_cache_memory=2**20, max_model_len=96
)
CASES: list[Case] = [(config, OPTIONS) for config in MODELS.values()]
CASES.append((MODELS["llama"], replace(OPTIONS, runner="device")))


def say(executor: RankExecutor, num_tokens: int = 8) -> Any:
    """Greedy and drawn tokens, with filters, penalties and log-probabilities, in a batch."""
    groups = len(executor.worker.facts.kv_windows)
    requests = [
        new_request(
            request.request_id,
            [token % 96 for token in request.token_ids],
            block_ids=[
                block for place in range(16) for block in range((place * 8 + i) * groups, (place * 8 + i + 1) * groups)
            ],
            **{name: getattr(request.sampling, name) for name in request.sampling.__struct_fields__},
        )
        for i, request in enumerate(prompts())
    ]
    return generate(executor, requests, chunk=16, num_tokens=num_tokens)  # type: ignore[arg-type]


def alone(case: Case) -> Any:
    return say(RankExecutor(load(*case, Layout()), Layout(), []))


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return [alone(case) for case in CASES]


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 1), (1, 2), (1, 3), (2, 2)])
def test_ranks_say_what_one_says(tp: int, pp: int, expected: list[Any], tmp_path: Path) -> None:
    which = [i for i, (_, options) in enumerate(CASES) if pp == 1 or options.runner != "device"]
    for rank, found in enumerate(run(tp, pp, tmp_path, [CASES[i] for i in which], say)):
        for index, tokens in zip(which, found, strict=True):
            assert tokens == expected[index], (rank, [*MODELS, "device"][index])


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (3, 1)])
def test_ranks_that_share_memory(tp: int, pp: int, tmp_path: Path) -> None:
    """Of torch, and of the library of the CPU path, whose ranks say the same to the last bit."""
    wide: dict[str, Any] = {
        **UNEVEN,
        "hidden_size": 64,
        "intermediate_size": 96,
    }  # a tile and a block for each of three ranks
    cases: list[Case] = [
        (small_model(**wide), OPTIONS),
        (small_model(**wide), replace(OPTIONS, dtype="auto")),
        (small_model(architecture="Gemma2ForCausalLM", **GEMMA, **wide), replace(OPTIONS, dtype="auto")),
        (replace(MIXTURES["qwen2-moe"], **wide), replace(OPTIONS, dtype="auto")),
    ]
    expected = [alone(case) for case in cases]
    assert run(tp, pp, tmp_path, cases, say, join_memory) == [expected] * (tp * pp)


@pytest.mark.slow
def test_ranks_that_have_experts_whole_say_what_one_says(expected: list[Any], tmp_path: Path) -> None:
    which = [index for index, name in enumerate(MODELS) if name in MIXTURES]
    for found in run(2, 2, tmp_path, [CASES[i] for i in which], say, whole_experts=True):
        assert found == [expected[index] for index in which]


EXCHANGED: list[int] = []  # by a rank: how many rows it had to give


def exchange_all(join: Join, layout: Layout, path: str) -> Any:
    blocks.exchanges = lambda *_: True
    ranks = join(layout, path)

    def all_to_all(rows: torch.Tensor, sizes: Sequence[Sequence[int]]) -> torch.Tensor:
        EXCHANGED.append(len(rows))
        return type(ranks).all_to_all(ranks, rows, sizes)

    ranks.all_to_all = all_to_all
    return ranks


def share_tensors(layout: Layout, path: str) -> SharedTensors:
    ranks = join_memory(layout, path)
    assert ranks is not None
    return SharedTensors(ranks)


def say_and_exchange(executor: RankExecutor) -> Any:
    EXCHANGED.clear()
    return say(executor), executor.worker.tokens_of_experts(), max(EXCHANGED) > 8


@pytest.mark.slow
@pytest.mark.parametrize(("size", "join"), [(2, join_gloo), (3, join_gloo), (3, share_tensors)])
def test_ranks_that_exchange_rows_say_what_one_says(size: int, join: Join, tmp_path: Path) -> None:
    """Of 5 experts 3 + 2 or 2 + 2 + 1; in the first step of a single token, of which all but one have none. And each
    counts the tokens of all."""
    mixtral = small_model(architecture="MixtralForCausalLM", numbers=EXPERTS)
    cases: list[Case] = [(config, OPTIONS) for config in (mixtral, *MIXTURES.values())]
    expected = []
    for case in cases:
        one = RankExecutor(load(*case, Layout()), Layout(), [])
        expected.append((say(one), one.worker.tokens_of_experts(), True))
    found = run(size, 1, tmp_path, cases, say_and_exchange, partial(exchange_all, join), whole_experts=True)
    assert found == [expected] * size


def test_ranks_exchange_rows_where_that_sends_less_and_never_in_a_graph() -> None:
    """They ask the device how many go where."""
    assert blocks.exchanges(2048, 8, 2)
    assert not blocks.exchanges(2048, 4, 2)
    assert not blocks.exchanges(LARGEST, 8, 2)


def read_on(executor: RankExecutor) -> Any:
    """Greedy tokens of the embedded model."""
    requests = [
        new_request(f"r{i}", [504, 3575, 282, 260 + i], block_ids=[2 * i, 2 * i + 1], temperature=0.0) for i in range(3)
    ]
    return generate(executor, requests, chunk=3, num_tokens=5)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(3, 1), (2, 2)])
def test_ranks_of_the_embedded_model(tp: int, pp: int, tmp_path: Path) -> None:
    """9 query and 3 KV heads: three groups on two ranks, or one on each."""
    options = replace(OPTIONS, block_size=16, kv_cache_memory=2**23)
    one = read_on(RankExecutor(load(embedded_gguf(), options, Layout()), Layout(), []))
    assert len({tuple(tokens) for tokens in one.values()}) > 1
    assert run(tp, pp, tmp_path, [(embedded_gguf(), options)], read_on) == [[one]] * (tp * pp)


def meet(layout: Layout, store: str, timeout: float, last: bool, told: Connection) -> None:
    communicator = join_gloo(layout, store, timeout)
    assert communicator is not None
    tensor = torch.full((3,), float(layout.rank + 1))
    communicator.all_reduce_(tensor)
    told.send(tensor.tolist())
    if layout.rank == 1:
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    try:
        communicator.all_reduce_(tensor)
    except RankLost as lost:
        told.send(ErrorInWords.of(lost))


@pytest.mark.slow
@pytest.mark.parametrize("last", [True, False], ids=["killed", "late"])
def test_a_rank_that_does_not_come_is_missed(last: bool, tmp_path: Path) -> None:
    """At once if it is gone, else at the deadline; and that it is lost can be told over the wire."""
    ends = [PROCESSES.Pipe(duplex=False) for _ in range(2)]
    timeout = SECONDS if last else 2.0
    with processes() as start:
        for rank, (_, told) in enumerate(ends):
            layout = Layout(tensor_parallel_size=2, rank=rank)
            start(partial(meet, layout, str(tmp_path / "store"), timeout, last, told))
        for receiver, _ in ends:
            assert receiver.poll(SECONDS)
            assert receiver.recv() == [3.0, 3.0, 3.0]
        assert ends[0][0].poll(SECONDS / 2)
        error = ends[0][0].recv().error()
    assert type(error) is RankLost
    assert str(error) == f"rank 0 on {socket.gethostname()} failed in a collective (timeout or closed connection)"


def test_a_rank_has_the_keys_and_values_of_its_own_heads_and_layers() -> None:
    config = MODELS["gemma2"]  # of 3 layers, in 2 groups
    sizes = {}
    for layout in (
        Layout(),
        *(Layout(tensor_parallel_size=2, pipeline_parallel_size=2, rank=rank) for rank in range(4)),
    ):
        spec = rank_spec(config, OPTIONS, "cpu", layout)
        assert kv_layout(config, spec).windows == kv_layout(config).windows
        size = kv_cache_size(
            config,
            element_size=4,
            block_size=4,
            max_num_seqs=8,
            max_model_len=96,
            budget=2**30,
            kv_cache_memory=None,
            spec=spec,
        )
        sizes[layout.rank if layout.world_size > 1 else "all"] = size.bytes_per_block, kv_layout(config, spec)
    head = 2 * 4 * 4 * 16  # of a block: keys and values of 4 tokens, 16 float32 each
    whole, layers = sizes.pop("all")
    assert whole == 2 * head * layers.num_slots
    for num_bytes, own in sizes.values():
        assert num_bytes == head * own.num_slots
    of_stages = [sizes[rank][1] for rank in (0, 2)]
    assert sum((own.groups for own in of_stages), ()) == layers.groups
    for own in of_stages:  # layers of one group have slots of their own
        assert len(set(zip(own.groups, own.slots, strict=True))) == len(own.slots)
