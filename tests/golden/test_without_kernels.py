"""Models whose attention or states have no kernel for CUDA devices: torch computes them there as it does on a CPU, with
all tensors of a step on the device. And Triton's kernels for norms, activations and experts fit what they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from app.serving.loading import core_factory, open_files
from engine.core.core import EngineCore
from gpu.kernels.dispatch import interpreted
from tests.engine.helpers import byte_level_tokenizer
from tests.golden import test_hybrids as hybrids
from tests.golden import test_small_models as small
from tests.golden.driving import Story, drive, fresh_core, plans_of
from tests.golden.test_small_models import ask, prompt
from tests.gpu.card_tensors import CARD, pretended_card
from tests.gpu.gemma_models import vary

NAMES = ["deepseek-v3", "glm-flash", "gemma4", "gemma4-moe", "gemma3n", "qwen3-next", "qwen3.5", "lfm2", "lfm2-moe"]
NAMES += ["granite4-hybrid"]
DIFFERENCE = 2e-5  # of log-probabilities: torch computes attention by another algorithm on CUDA


@pytest.fixture(scope="module", params=NAMES)
def directory(request, tmp_path_factory) -> Path:
    """A model that transformers made and saved."""
    torch.manual_seed(2)
    if request.param in hybrids.MODELS:
        kind, config = hybrids.MODELS[request.param]
        oracle = kind._from_config(config)
    else:
        oracle = transformers.AutoModelForCausalLM.from_config(small.CONFIGS[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    vary(oracle.eval()).save_pretrained(folder)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def core_of(directory: Path, **changes: Any) -> EngineCore:
    settings = hybrids.settings_of(directory, state_checkpoint_interval=32).model_copy(update=changes)
    return core_factory(settings, open_files(settings, None))()


def everything(core: EngineCore) -> Story:
    """Chunks and decodes in common steps, prompts on cached prefixes, states from checkpoints."""
    core = fresh_core(core, max_num_batched_tokens=20)
    system, long = prompt(10, 16), prompt(13, 70)
    arrivals = {
        0: [ask("first", system + prompt(11, 12), 16), ask("second", prompt(12, 3), 20)],
        1: [ask("long", long, 6)],
        3: [ask("shared", system + prompt(14, 7), 10)],
        12: [ask("again", system + prompt(11, 12) + prompt(3, 5), 6)],
        30: [ask("turn", long + prompt(4, 4), 6)],
    }
    story = drive(core, arrivals)
    assert any({1} < set(plan.values()) for plan in plans_of(core)), "prefills and decodes share steps"
    assert story.num_cached_tokens("turn") >= 64
    core.executor._executor.shutdown()  # type: ignore[attr-defined]
    return story


def assert_alike(story: Story, other: Story, bound: float) -> None:
    for name in other.outputs:
        pairs = zip(story.logprobs(name), other.logprobs(name), strict=True)
        for one, two in pairs:
            assert one.token_id == two.token_id
            assert abs(one.logprob - two.logprob) < bound


@pytest.mark.slow
def test_a_card_computes_what_the_cpu_does(directory: Path):
    on_cpu = everything(core_of(directory))
    with pretended_card():
        core = core_of(directory, device="cuda")
        executor: Any = core.executor
        assert executor.summary.startswith("cuda:0, float32 weights (torch's operations without CUDA graphs")
        assert_alike(everything(core), on_cpu, DIFFERENCE)


@pytest.mark.slow
def test_a_card_computes_in_bfloat16(directory: Path):
    with pretended_card():
        everything(core_of(directory, device="cuda", dtype="bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "directory", ["gemma3n", "gemma4-moe", "deepseek-v3", "qwen3-next", "granite4-hybrid"], indirect=True
)
def test_kernels_of_other_layers_take_what_these_models_give_them(directory: Path):
    """Compare on kernels in Triton's interpreter, which is slow."""
    request = ask("one", prompt(1, 6), 3)
    on_cpu = drive(core_of(directory), [request])
    with interpreted():
        computed = drive(core_of(directory), [request])
    assert_alike(computed, on_cpu, DIFFERENCE)


def test_the_card_refuses_to_mix_devices():
    with pretended_card():
        here, there = torch.ones(3), torch.ones(3, device=CARD)
        with pytest.raises(RuntimeError, match="and on the CPU"):
            there + here
        with pytest.raises(RuntimeError, match="numpy"):
            there.numpy()
        assert (there + 1).cpu().tolist() == [2.0] * 3
        assert here.to(CARD).device == CARD
