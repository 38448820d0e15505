"""How tokens are spread over experts comes with the stats of a step, and shows in the metrics."""

from functools import partial

import pytest
import torch

from app.observability.metrics import Metrics
from gpu.attention import TorchAttention
from gpu.models.decoder import CausalLM
from tests.engine.helpers import make_request
from tests.golden.histories import load, small_model
from tests.gpu.native_builds import needs_library

MIXTRAL = small_model(architecture="MixtralForCausalLM", numbers={"num_experts": 4, "num_experts_per_tok": 2})
COMPUTES: dict[str, dict[str, str]] = {
    "library": {"dtype": "auto"},
    "torch": {"dtype": "float32"},
    "device": {"dtype": "float32", "runner": "device"},
}


@pytest.mark.parametrize("what", [pytest.param("library", marks=needs_library), "torch", "device"])
def test_how_many_tokens_went_to_experts_and_how_evenly(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr("engine.core.participants.STEPS_BETWEEN_EXPERT_LOADS", 1)
    core = load(MIXTRAL, **COMPUTES[what])
    core.add(make_request([5, 6, 7, 8, 9], "r", max_tokens=2, ignore_eos=True, seed=0))
    metrics = Metrics("model")
    loads = []
    while core.has_work:
        stats = core.step().stats
        loads.append(stats.expert_load)
        metrics.on_step(stats, 0)
    core.shutdown()
    first, second = (load for load in loads if load)
    assert [tokens for tokens, _ in first] == [10] * 3  # of three layers, each token at two experts
    assert second == [(2, 2.0)] * 3  # one token, at two of four
    assert all(1.0 <= imbalance <= 2.0 for _, imbalance in first)
    text = metrics.render().decode()
    assert 'headrace:expert_tokens_total{layer="2"} 12.0' in text
    assert 'headrace:expert_imbalance{layer="0"} 2.0' in text


def test_the_padding_of_a_graph_is_no_token() -> None:
    attention = partial(TorchAttention, block_size=4)
    model = CausalLM(MIXTRAL, dtype=torch.float32, device="cpu", max_model_len=64, attention=attention)
    chosen = torch.tensor([[0, 1], [0, 1], [2, 0]])
    for _ in range(2):
        for mixture in model._mixtures:
            mixture.chosen = chosen
        model._count_experts(torch.tensor([7, -1, 3]))
    assert model.tokens_of_experts.tolist() == [[4, 2, 2, 0]] * 3
