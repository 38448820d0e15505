"""Models with states, and models with latents instead of keys and values, under the law: whatever happened to a
request, its greedy tokens are those of its solo, cold run (`tests.golden.histories`). And what a second turn of a long
conversation costs."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core.core import EngineCore
from gpu.checkpoint import ModelConfig
from gpu.executor import UniProcExecutor
from gpu.runner.runner import WorkerOptions
from gpu.worker import Worker
from tests.engine.helpers import make_request
from tests.golden.driving import RecordedExecutor, drive, plans_of
from tests.golden.histories import History, Law, load, small_model, weights_of
from tests.gpu.deepseek_models import OWN_NAMES

NUM_HISTORIES = int(os.environ.get("HEADRACE_HISTORIES", "200"))
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
}
LATENT = "DeepseekV3ForCausalLM"
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_head": 0,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
    "logits_scaling": 1.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3NextForCausalLM": LINEAR | EXPERTS,
    "Qwen3_5ForCausalLM": LINEAR,
    "Lfm2ForCausalLM": {"conv_L_cache": 3, "conv_bias": False},
    "GraniteMoeHybridForCausalLM": MAMBA,
}


def hybrid(name: str, **changes: Any) -> ModelConfig:
    layers = ("linear_attention", "linear_attention", "full_attention")
    return small_model(architecture=name, numbers=MODELS[name], layer_types=layers, qk_norm=True, **changes)


IN_LIBRARY = [f"{name} in the library" for name in MODELS if name.startswith("Qwen")]


@pytest.fixture(scope="module", params=[*MODELS, LATENT, *IN_LIBRARY])
def law(request, tmp_path_factory) -> Iterator[Law]:
    name, exact = request.param.split()[0], request.param in IN_LIBRARY
    config = small_model(architecture=LATENT, **OWN_NAMES) if name == LATENT else hybrid(name)
    core = load(config, dtype="bfloat16" if exact else "float32")
    yield Law(core, tmp_path_factory.mktemp("kv"), exact=exact, depths=(1, 2))
    core.shutdown()


@pytest.mark.timeout(3600)
def test_tokens_are_those_of_a_solo_cold_run(law: Law):
    for seed in range(NUM_HISTORIES):
        try:
            History(law, seed).tell()
        except AssertionError as error:
            raise AssertionError(f"history {seed}: {error}") from error
    own = "checkpoints" if law.has_states else "loaded"
    for event in ("hits", own, "preempted", "chunks", "mixed steps", "left", "restarted"):
        assert law.seen[event] > 0, f"the histories never went through: {event}"
    assert law.seen["near ties"] <= NUM_HISTORIES / 20


@pytest.mark.timeout(600)
def test_a_second_turn_of_8000_tokens_computes_at_most_one_interval_again():
    config = hybrid("Qwen3NextForCausalLM", max_position_embeddings=8400)
    limits: dict[str, Any] = {"max_model_len": 8400, "max_num_seqs": 4, "max_num_batched_tokens": 512}
    options = WorkerOptions(dtype="float32", device="cpu", num_threads=1, kv_cache_memory=2**25, **limits)
    executor = UniProcExecutor(Worker(config, weights_of(config), options), config.vocab_size)
    limits |= {"facts": executor.facts, "target_inter_token_latency": 60.0}
    core = EngineCore(EngineConfig(**limits), RecordedExecutor(executor))
    draw = random.Random(0)
    prompt = [draw.randrange(config.vocab_size) for _ in range(7900)]
    answer = drive(core, [make_request(prompt, "first", max_tokens=100, ignore_eos=True, seed=0)]).tokens("first")
    # The next turn goes on with the answer; or the template has left out a part of the history, so it parts from it.
    for name, known in (("goes on", prompt + answer), ("leaves out", prompt[:7890])):
        new = [draw.randrange(config.vocab_size) for _ in range(40)]
        story = drive(core, [make_request(known + new, name, max_tokens=2, ignore_eos=True, seed=0)])
        again = len(known) - story.num_cached_tokens(name)
        assert again <= (1024 if name == "leaves out" else 16)
        assert sum(plan.get(name, 0) for plan in plans_of(core)) == again + len(new) + 1
    executor.shutdown()
