"""A family of models is one record: who reads it computes what it says, or refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import gguf
import pytest
import torch
import transformers
from transformers import LlamaConfig, Qwen3Config

from gpu.checkpoint import ModelConfig, ModelError, open_model
from gpu.checkpoint.architecture import (
    Architecture,
    AttentionSpec,
    GeGLUSpec,
    LayerSpec,
    Part,
    RMSNormSpec,
    SwiGLUSpec,
    llama_layer,
    parts_of,
)
from gpu.checkpoint.config import HeaderField
from gpu.checkpoint.families.table import FAMILIES, spec_of
from gpu.checkpoint.gguf_model import GGUF_FAMILIES
from gpu.checkpoint.hf_config import config_from_hf
from gpu.checkpoint.tensors import tensor_shapes
from gpu.cpu.decoder import CPUCausalLM
from gpu.model_loader import load_model
from gpu.models.layers import weight_slots
from gpu.runner.runner import WorkerOptions
from gpu.weights.reading import dummy_weights
from gpu.weights.tensors import weights_of
from tests.gpu import sink_models
from tests.gpu.checkpoint_files import TINY, TinyGGUF, random_weights
from tests.gpu.oracles import SMALL, Runner, assert_logits, build, expected, model_config, prompt

NEW = "NewForCausalLM"
Change = Callable[[LayerSpec, int], LayerSpec]


@dataclass(frozen=True)
class ExpertsSpec:
    """A feed-forward network that nobody computes."""

    router: Part
    experts: tuple[SwiGLUSpec, ...]


class OtherNormSpec(RMSNormSpec):
    pass


class OtherAttentionSpec(AttentionSpec):
    pass


def experts(layer: LayerSpec, index: int, count: int = 2) -> LayerSpec:
    dense = layer.feed_forward
    assert isinstance(dense, SwiGLUSpec)
    parts = {
        name: [
            replace(part, name=part.name.replace("mlp", f"mlp.experts.{i}"), gguf=f"{part.gguf}.{i}")
            for i in range(count)
        ]
        for name, part in vars(dense).items()
    }
    router = Part(f"model.layers.{index}.mlp.gate", f"blk.{index}.ffn_gate_inp", (count, dense.gate.shape[1]))
    other = ExpertsSpec(router, tuple(map(SwiGLUSpec, *parts.values())))
    return replace(layer, feed_forward=other)  # type: ignore[arg-type]  # a kind that nobody knows


def other_norm(layer: LayerSpec, index: int) -> LayerSpec:
    assert layer.attention_norm is not None
    return replace(layer, attention_norm=OtherNormSpec(layer.attention_norm.weight, layer.attention_norm.eps))


def other_attention(layer: LayerSpec, index: int) -> LayerSpec:
    return replace(layer, attention=OtherAttentionSpec(**vars(layer.attention)))


def every_second_window(layer: LayerSpec, index: int) -> LayerSpec:
    heads = replace(layer.attention.heads, window=11 if index % 2 else None)
    return replace(layer, attention=replace(layer.attention, heads=heads))


def another_scale(layer: LayerSpec, index: int) -> LayerSpec:
    heads = replace(layer.attention.heads, scale=0.1 * (index + 1))
    return replace(layer, attention=replace(layer.attention, heads=heads))


def another_head_size(layer: LayerSpec, index: int) -> LayerSpec:
    heads = replace(layer.attention.heads, dim=layer.attention.heads.dim * (1 + index % 2))
    return replace(layer, attention=replace(layer.attention, heads=heads))


def some_gelu(layer: LayerSpec, index: int) -> LayerSpec:
    return layer if index % 2 else replace(layer, feed_forward=GeGLUSpec(**vars(layer.feed_forward)))


def another_epsilon(layer: LayerSpec, index: int) -> LayerSpec:
    assert layer.feed_forward_norm is not None
    return replace(layer, feed_forward_norm=replace(layer.feed_forward_norm, eps=1e-3))


def all_biases(layer: LayerSpec, index: int) -> LayerSpec:
    attention = layer.attention
    query, key, value = (replace(part, bias=True) for part in attention.qkv)
    return replace(layer, attention=replace(attention, qkv=(query, key, value), out=replace(attention.out, bias=True)))


def bias_behind_the_network(layer: LayerSpec, index: int) -> LayerSpec:
    network = layer.feed_forward
    assert isinstance(network, SwiGLUSpec)
    return replace(layer, feed_forward=replace(network, down=replace(network.down, bias=True)))


def one_bias(layer: LayerSpec, index: int) -> LayerSpec:
    query, key, value = layer.attention.qkv
    return replace(layer, attention=replace(layer.attention, qkv=(replace(query, bias=True), key, value)))


@pytest.fixture
def new_family(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], None]:
    """Registers a family whose layers are Llama's, changed."""

    def register(change: Change) -> None:
        family = Architecture(name=NEW, layer=lambda config, index: change(llama_layer(config, index), index))
        monkeypatch.setitem(FAMILIES, NEW, family)

    return register


def config_of(**more: Any) -> ModelConfig:
    config = replace(model_config(LlamaConfig(**SMALL | {"head_dim": 16})), **{"architecture": NEW} | more)
    own = FAMILIES[config.architecture].numbers if config.architecture in FAMILIES else {}
    largest = {name: field.default or field.high for name, field in own.items()}
    largest |= {"num_kv_shared_layers": 0, "sparsity": 0.5}  # the largest would leave no layer keys or activations
    return replace(config, numbers=largest | {**config.numbers})


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("bias", "norm", "tied"), list(itertools.product([False, True], repeat=3)))
def test_the_torch_model_of_a_family_takes_just_the_tensors_of_its_record(name, bias, norm, tied):
    config = config_of(architecture=name, attention_bias=bias, qk_norm=norm, tie_word_embeddings=tied)
    model = build(config, device="meta")
    assert {name: slot.shape for name, slot in weight_slots(model).items()} == tensor_shapes(config)


def place(part: Part) -> tuple[Any, ...]:
    """Return where a GGUF file stores the part: tensor, expert and first row."""
    is_fused = part.stack is not None and part.stack.in_gguf
    return part.gguf, part.expert, part.rows.start if is_fused and isinstance(part.rows, slice) else 0


@pytest.mark.parametrize("name", FAMILIES)
def test_no_two_parts_of_a_family_have_a_name_in_common(name):
    parts = [part for layer in spec_of(config_of(architecture=name)).layers for part in parts_of(layer.feed_forward)]
    assert len({part.name for part in parts}) == len(set(map(place, parts))) == len(parts)


def test_a_dense_family_is_served_once_its_record_is_there(tmp_path, monkeypatch):
    family = Architecture(name=NEW, gguf="qwen2", defaults={"head_dim": 32}, attention_bias=True)
    monkeypatch.setitem(FAMILIES, NEW, family)
    monkeypatch.setitem(GGUF_FAMILIES, "qwen2", family)

    values = {**SMALL, "architectures": [NEW], "max_position_embeddings": 128}
    from_hf = config_from_hf({key: value for key, value in values.items() if key != "head_dim"}, source="new")
    assert (from_hf.architecture, from_hf.head_dim, from_hf.attention_bias) == (NEW, 32, True)

    written = replace(TINY, architecture="Qwen2ForCausalLM", attention_bias=True)
    path = TinyGGUF(tmp_path / "m.gguf", written).add_weights(random_weights(written)).save()
    files = open_model(str(path))
    assert files.config == replace(written, architecture=NEW, torch_dtype="bfloat16")
    assert {name: tuple(tensor.shape) for name, tensor in weights_of(files)} == tensor_shapes(written)


def test_sinks_are_read_by_their_names_in_either_kind_of_file(tmp_path, monkeypatch):
    monkeypatch.setitem(FAMILIES, sink_models.NAME, sink_models.FAMILY)
    monkeypatch.setitem(GGUF_FAMILIES, "qwen2", sink_models.FAMILY)
    config = replace(TINY, architecture=sink_models.NAME, attention_bias=True, torch_dtype="bfloat16")
    in_hf = ["model.layers.0.self_attn.sinks", "model.layers.1.self_attn.sinks"]
    assert [name for name in tensor_shapes(config) if "sinks" in name] == in_hf

    in_gguf = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, 2)
    weights = random_weights(config)
    sinks = {name: weights.pop(name) for name in in_hf}
    file = TinyGGUF(tmp_path / "m.gguf", replace(config, architecture="Qwen2ForCausalLM")).add_weights(weights)
    for name, sink in sinks.items():
        file.writer.add_tensor(f"{in_gguf.get_name(name)}.weight", sink)
    files = open_model(str(file.save()))
    assert files.config == config
    read = dict(weights_of(files))
    assert read.keys() == tensor_shapes(config).keys()
    assert all((read[name].numpy() == sink).all() for name, sink in sinks.items())


def moe_layer(config: ModelConfig, index: int) -> LayerSpec:
    return experts(llama_layer(config, index), index, int(config.numbers["num_experts"]))


MOE = Architecture(
    name=NEW,
    gguf="qwen2",
    numbers={"num_experts": HeaderField(int, 1, 64, "experts", "expert_count")},
    layer=moe_layer,
)


@pytest.mark.parametrize("count", [0, 65, 1.5, None])
def test_a_number_that_only_a_family_has_is_read_within_its_bounds(tmp_path, monkeypatch, count):
    monkeypatch.setitem(FAMILIES, NEW, MOE)
    monkeypatch.setitem(GGUF_FAMILIES, "qwen2", MOE)
    values = {**SMALL, "architectures": [NEW], "max_position_embeddings": 128, "num_experts": 3}
    config = config_from_hf(values, source="new")
    assert config.numbers == {"num_experts": 3}
    assert "model.layers.2.mlp.experts.2.down_proj.weight" in tensor_shapes(config)

    gguf = TinyGGUF(tmp_path / "m.gguf", replace(TINY, architecture="Qwen2ForCausalLM"))
    gguf.writer.add_uint32("qwen2.expert_count", 65)
    gguf.add_weights(random_weights(TINY))
    with pytest.raises(ModelError, match=r"metadata qwen2.expert_count must be an integer from 1 to 64 experts, got"):
        open_model(str(gguf.save()))
    with pytest.raises(ModelError, match=rf"num_experts in config.json must be an integer from 1 to 64.*got {count}"):
        config_from_hf(values | {"num_experts": count}, source="new")


@pytest.mark.parametrize("change", [experts, other_attention])
def test_a_kind_of_layer_that_nobody_computes_is_refused_by_its_name(new_family, change):
    new_family(change)
    config = config_of()
    with pytest.raises(ModelError, match=r"kind (Experts|OtherAttention)Spec is not implemented"):
        load_model(config, dummy_weights(config), WorkerOptions(max_model_len=16), "cpu")


@pytest.mark.parametrize(
    "change",
    [
        *(experts, other_norm, other_attention, another_head_size, some_gelu, another_epsilon),
        *(bias_behind_the_network, one_bias),
    ],
)
def test_the_library_takes_no_model_that_it_would_compute_wrong(new_family, change):
    new_family(lambda layer, index: layer)
    assert CPUCausalLM.supports(config_of())
    new_family(change)
    assert not CPUCausalLM.supports(config_of())


@pytest.mark.parametrize("change", [every_second_window, another_scale])
def test_the_library_takes_layers_that_see_in_ways_of_their_own(new_family, change):
    new_family(change)
    assert CPUCausalLM.supports(config_of())


def assert_equals_transformers(config: ModelConfig, oracle: transformers.PreTrainedModel) -> None:
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.normal_(1.0, 0.3)
    model = build(config)
    model.load_weights(oracle.state_dict().items())
    tokens = prompt(0)
    (logits,) = Runner(model).step((tokens, 0, list(range(12))))
    assert_logits(logits, expected(oracle, tokens))


def test_layers_with_windows_of_their_own_give_the_logits_of_transformers(new_family):
    """Two attention backends in one model."""
    new_family(every_second_window)
    kinds = ["sliding_attention" if index % 2 else "full_attention" for index in range(SMALL["num_hidden_layers"])]
    theirs = Qwen3Config(**SMALL | {"head_dim": 16}, use_sliding_window=True, sliding_window=11, layer_types=kinds)
    oracle = transformers.AutoModelForCausalLM.from_config(theirs, attn_implementation="eager").eval()
    assert_equals_transformers(replace(model_config(theirs), architecture=NEW, sliding_window=None), oracle)


def test_a_bias_on_the_output_gives_the_logits_of_transformers(new_family):
    new_family(all_biases)
    theirs = LlamaConfig(**SMALL, attention_bias=True)
    oracle = transformers.AutoModelForCausalLM.from_config(theirs, attn_implementation="eager").eval()
    assert_equals_transformers(replace(model_config(theirs), architecture=NEW), oracle)
