"""Configurations of the dense families, hybrids, and families with latent attention, with random changes: each is
refused by name, or gives transformers' logits."""

import pytest

from tests.gpu.deepseek_models import DEEPSEEK
from tests.gpu.hybrid_models import HYBRIDS
from tests.gpu.mutated_configs import run

FIRST, COUNT = 1_000_000, 200
NAMES = [
    "ministral3",
    "phi4-mini-long",
    "granite",
    "granite4",
    "smollm3-window",
    "olmo2",
    "olmo3",
    "glm4",
    "glm",
    "qwen2-moe",
    *HYBRIDS,
    "gemma4",
    "gemma4-moe",
    "gemma3n",
]


COUNTS = {**dict.fromkeys(NAMES, COUNT), **dict.fromkeys([*DEEPSEEK, *HYBRIDS], COUNT // 2)}


@pytest.mark.parametrize("name", COUNTS)
def test_a_changed_configuration_is_refused_or_right(name: str) -> None:
    outcomes, wrong = run(name, FIRST, COUNTS[name])
    assert not wrong, "\n".join(wrong)
    assert min(outcomes["refused"], outcomes["equal"]) > COUNTS[name] // 10
