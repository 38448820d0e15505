"""Tensors on their way into a model: those that do not fit are named."""

from collections.abc import Iterable

import pytest
import torch
import transformers

from gpu.checkpoint import ModelError
from gpu.checkpoint.architecture import Part
from gpu.models.decoder import CausalLM
from gpu.models.layers import Linear, Place
from tests.gpu.oracles import ORACLES, build, model_config


@pytest.fixture
def checkpoint() -> dict[str, torch.Tensor]:
    oracle = transformers.AutoModelForCausalLM.from_config(ORACLES["qwen2"])
    return dict(oracle.state_dict())


def load(weights: Iterable[tuple[str, torch.Tensor]], name: str = "qwen2") -> CausalLM:
    model = build(model_config(ORACLES[name]))
    model.load_weights(weights)
    return model


def test_a_missing_tensor_is_named(checkpoint):
    del checkpoint["model.layers.1.self_attn.k_proj.bias"]
    with pytest.raises(ModelError, match=r"1 missing: model\.layers\.1\.self_attn\.k_proj\.bias\. Fetch"):
        load(checkpoint.items())


def test_an_unexpected_tensor_is_named(checkpoint):
    checkpoint["model.layers.3.mlp.up_proj.weight"] = torch.zeros(1)
    with pytest.raises(ModelError, match=r"1 unknown: 'model\.layers\.3\.mlp\.up_proj\.weight'\. Fetch"):
        load(checkpoint.items())


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(checkpoint):
    checkpoint["model.layers.0.self_attn.v_proj.weight"] = torch.zeros(8, 48)
    wanted = r"1 misshapen: model\.layers\.0\.self_attn\.v_proj\.weight is \[8, 48\], needs \[16, 48\]\. Fetch"
    with pytest.raises(ModelError, match=wanted):
        load(checkpoint.items())


def test_a_tensor_that_comes_twice_is_named(checkpoint):
    twice = [*checkpoint.items(), ("model.norm.weight", checkpoint["model.norm.weight"])]
    with pytest.raises(ModelError, match=r"1 given twice: model\.norm\.weight\. Fetch"):
        load(twice)


def test_all_faults_are_told_at_once_and_long_lists_are_cut(checkpoint):
    strangers = [(f"adapter.blocks.{i}", torch.zeros(1)) for i in range(100)]
    del checkpoint["model.embed_tokens.weight"]
    message = r"1 missing: model\.embed_tokens\.weight; 100 unknown: 'adapter\.blocks\.0', .* and 92 more\. Fetch"
    with pytest.raises(ModelError, match=message):
        load([*checkpoint.items(), *strangers])


def test_rotary_frequencies_and_a_tied_head_in_the_checkpoint_are_ignored():
    oracle = transformers.AutoModelForCausalLM.from_config(ORACLES["llama-tied"])
    weights = dict(oracle.state_dict())
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    weights["lm_head.weight"] = torch.full_like(weights["model.embed_tokens.weight"], 7.0)
    model = load(weights.items(), "llama-tied")
    assert model.lm_head is not None
    torch.testing.assert_close(model.lm_head.weight.data, weights["model.embed_tokens.weight"])


def test_weights_are_converted_to_the_dtype_of_the_model(checkpoint):
    model = build(model_config(ORACLES["qwen2"]), dtype=torch.float16)
    model.load_weights((name, tensor.double()) for name, tensor in checkpoint.items())
    merged = model.layers.get_parameter("2.feed_forward.gate_up.weight")
    assert merged.dtype == torch.float16
    assert torch.equal(merged[80:], checkpoint["model.layers.2.mlp.up_proj.weight"].half())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 64, 200])
def test_a_packed_matrix_gives_what_the_plain_one_gives(num_rows, bias):
    generator = torch.Generator().manual_seed(num_rows)
    parts = Part("a", "a", (40, 72), bias), Part("b", "b", (93, 72), bias)
    layer = Linear(*parts, place=Place(torch.bfloat16, "cpu"))
    with torch.inference_mode():
        for _, slot in layer.weight_slots():
            slot.copy_(torch.randn(slot.shape, generator=generator))
        x = torch.randn(num_rows, 72, generator=generator).bfloat16()
        plain = layer(x)
        layer.pack()
        torch.testing.assert_close(layer(x), plain)
