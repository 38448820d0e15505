"""Whatever happened to a request, its tokens are those of its solo, cold run: random histories of small random models
(`tests.golden.histories`), by every way that the engine has of computing them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.golden.histories import History, Law, load, small_model
from tests.selection import slow_except

MODELS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"sliding_window": 11},
    "some windows": {"sliding_window": 11, "layer_types": ("sliding_attention", "full_attention", "sliding_attention")},
}
SHARED_KEYS = {  # as Gemma 4: the last two layers read the keys and values of the two before, which differ in size
    "architecture": "Gemma4ForCausalLM",
    "num_hidden_layers": 4,
    "sliding_window": 11,
    "layer_types": ("sliding_attention", "full_attention", "sliding_attention", "full_attention"),
    "qk_norm": True,
    "tie_word_embeddings": True,
    "numbers": {
        "final_logit_softcapping": 0.0,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 96,
        "rope_local_base_freq": 100.0,
        "rope_proportion": 0.5,
        "global_head_dim": 32,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": False,
        "use_double_wide_mlp": False,
        "moe_intermediate_size": 0,
    },
}
# By what they are computed, how it is loaded, and how many histories are told.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "library": ({"dtype": "bfloat16"}, {"exact": True}, 100),
    "torch": ({"dtype": "float32"}, {"exact": False}, 5),
    "device": ({"dtype": "float32", "runner": "device"}, {"exact": False, "depths": (1, 2)}, 5),
}


CASES = [*(f"{model} by {way}" for model in MODELS for way in WAYS), "shared keys by torch"]
QUICK = ("full by library", "some windows by library", "full by device")


@pytest.fixture(scope="module", params=slow_except(CASES, *QUICK))
def told(request, tmp_path_factory) -> Iterator[tuple[Law, int]]:
    model, way = request.param.split(" by ")
    options, rules, number = WAYS[way]
    core = load(small_model(**MODELS.get(model, SHARED_KEYS)), **options)
    yield Law(core, tmp_path_factory.mktemp("kv"), **rules), number
    core.shutdown()


def tell(law: Law, seeds: range) -> None:
    law.seen.clear()
    for seed in seeds:
        try:
            History(law, seed).tell()
        except AssertionError as error:
            raise AssertionError(f"history {seed}: {error}") from error
    for event in (
        "hits",
        "preempted",
        "chunks",
        "mixed steps",
        "left",
        "restarted",
        "loaded",
    ):  # what a hundred go through
        assert len(seeds) < 100 or law.seen[event] > 0, f"the histories never went through: {event}"


def test_tokens_are_those_of_a_solo_cold_run(told):
    law, number = told
    tell(law, range(number // 5))


@pytest.mark.slow
def test_tokens_are_those_of_a_solo_cold_run_in_a_hundred_histories(told):
    law, number = told
    tell(law, range(number))


@pytest.mark.storm
@pytest.mark.timeout(3600)
def test_tokens_are_those_of_a_solo_cold_run_in_thousands_of_histories(told):
    law, number = told
    tell(law, range(10**6, 10**6 + number * 30))
