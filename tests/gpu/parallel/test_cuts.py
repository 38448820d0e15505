"""What the ranks have of a model is the model: each weight once, or as often as told; and no rank reads more."""

import itertools
import math
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.errors import ConfigError
from gpu.checkpoint import ModelConfig, ModelError, ModelFiles, QuantizedRows, open_model
from gpu.checkpoint.architecture import DecoderSpec, GatedDeltaSpec, LayerSpec, MoESpec, SwiGLUSpec, parts_of
from gpu.checkpoint.families.table import FAMILIES, spec_of
from gpu.checkpoint.hf_config import config_from_hf
from gpu.checkpoint.tensors import Weight, checked, shapes_of
from gpu.sharding import BLOCK, TILE, Layout, check_cuts, cut, sharded, stages
from gpu.weights.reading import dummy_weights, floats, read_weights
from tests.gpu.checkpoint_files import TINY, TinyGGUF, random_weights
from tests.gpu.dense_models import DENSE, MULTIPLIERS
from tests.gpu.hybrid_models import HYBRIDS
from tests.gpu.oracles import model_config
from tests.support.embedded_model import embedded_gguf

TOGETHER = {"Olmo2ForCausalLM", "Olmo3ForCausalLM"}  # with norms over all heads, which are not cut
# Experts and states have tests of their own; layers that read the keys of others are refused with ranks.
NOT_HERE = {"num_experts", "linear_num_key_heads", "conv_L_cache", "num_kv_shared_layers"}
FAMILY_NAMES = sorted({family.name for family in FAMILIES.values() if not NOT_HERE & {*family.numbers}} - TOGETHER)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    kv = draw(st.integers(1, 5))
    return replace(
        TINY,
        architecture=draw(st.sampled_from(FAMILY_NAMES)),
        vocab_size=draw(st.integers(1, 200)),
        hidden_size=draw(st.integers(1, 12)) * 16,
        intermediate_size=draw(st.integers(1, 12)) * 16,
        num_hidden_layers=draw(st.integers(1, 6)),
        num_attention_heads=kv * draw(st.integers(1, 5)),
        num_key_value_heads=kv,
        head_dim=draw(st.sampled_from([2, 4, 16])),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        numbers={"rope_local_base_freq": 10000.0, **MULTIPLIERS},
    )


def with_biases(spec: DecoderSpec) -> DecoderSpec:
    """Biases on what follows heads and inner features, as gpt-oss has them on the former."""

    def layer(spec: LayerSpec) -> LayerSpec:
        attention, network = spec.attention, spec.feed_forward
        assert isinstance(network, SwiGLUSpec)
        return replace(
            spec,
            attention=replace(attention, out=replace(attention.out, bias=True)),
            feed_forward=replace(network, down=replace(network.down, bias=True)),
        )

    return replace(spec, layers=tuple(map(layer, spec.layers)))


def layouts(tp: int, pp: int) -> list[Layout]:
    return [Layout(tensor_parallel_size=tp, pipeline_parallel_size=pp, rank=rank) for rank in range(tp * pp)]


def units(size: int, tp: int) -> int:
    return size // BLOCK if size % BLOCK == 0 and size // BLOCK >= tp else -(-size // TILE)


@settings(deadline=None, max_examples=80)
@given(configs(), st.integers(1, 7), st.integers(1, 4), st.booleans(), st.booleans())
def test_what_the_ranks_have_is_the_model(config: ModelConfig, tp: int, pp: int, gathers: bool, biases: bool) -> None:
    spec = with_biases(spec_of(config)) if biases else spec_of(config)
    counts = [units(config.vocab_size, tp), config.num_attention_heads]
    if gathers:  # the CPU library has inner features in blocks
        counts += [units(config.hidden_size, tp), -(-config.intermediate_size // BLOCK)]
    else:
        counts.append(units(config.intermediate_size, tp))
    if tp > min(counts):
        with pytest.raises(ConfigError, match=f"tensor_parallel_size is {tp}: "):
            [sharded(spec, layout, gathers=gathers) for layout in layouts(tp, 1)]
        with pytest.raises(ConfigError, match=f"tensor_parallel_size is {tp}: "):
            check_cuts(spec, layouts(tp, 1)[0], gathers=gathers)
        return
    if pp > config.num_hidden_layers:
        with pytest.raises(ConfigError, match=f"pipeline_parallel_size is {pp}: "):
            sharded(spec, layouts(tp, pp)[0], gathers=gathers)
        with pytest.raises(ConfigError, match=f"pipeline_parallel_size is {pp}: "):
            check_cuts(spec, layouts(tp, pp)[-1], gathers=gathers)
        return
    check_cuts(spec, layouts(tp, pp)[-1], gathers=gathers)

    shapes = shapes_of(spec)
    whole = {name: np.arange(math.prod(shape)).reshape(shape) for name, shape in shapes.items()}
    times = {name: np.zeros(shape, np.int64) for name, shape in shapes.items()}
    heads: Counter[int] = Counter()
    for layout in layouts(tp, pp):
        local = sharded(spec, layout, gathers=gathers)
        for name, weight in checked(cut(whole.items(), local), config, source="m", spec=local):
            np.add.at(times[name].reshape(-1), floats(weight).astype(np.int64).reshape(-1), 1)
        for index, layer in enumerate(local.layers, start=local.first_layer):
            assert layer.attention.heads.query % layer.attention.heads.kv == 0
            heads[index] += layer.attention.heads.query
    assert heads == dict.fromkeys(range(config.num_hidden_layers), config.num_attention_heads)

    for name, count in times.items():
        if name.endswith("norm.weight") or name in {
            part.weight_name for part in parts_of(spec) if len(part.shape) == 1
        }:
            expected = {tp}
        elif gathers is False and name.endswith(("o_proj.bias", "down_proj.bias")):
            expected = {1}  # of the ranks whose sums are added one adds it
        elif ".k_proj" in name or ".v_proj" in name:
            kv = config.num_key_value_heads
            expected = {1} if tp <= kv else {tp // kv, -(-tp // kv)}
        elif name == "model.embed_tokens.weight" and spec.head is None and pp > 1:
            expected = {2}  # and its last stage has it as its head
        else:
            expected = {1}
        assert set(np.unique(count)) <= expected, name


@settings(deadline=None, max_examples=50)
@given(configs(), st.integers(2, 7))
def test_query_heads_are_with_their_keys(config: ModelConfig, tp: int) -> None:
    assume(tp <= min(config.num_attention_heads, units(config.intermediate_size, tp), units(config.vocab_size, tp)))
    group = config.num_attention_heads // config.num_key_value_heads
    counts = []
    for layout in layouts(tp, 1):
        local = sharded(spec_of(config), layout, gathers=False)
        attention = local.layers[0].attention
        query, key, _ = attention.qkv
        first, last = (place // config.head_dim for place in (query.ranges or [(0, query.shape[0])])[0])
        kv_first, kv_last = (place // config.head_dim for place in (key.ranges or [(0, key.shape[0])])[0])
        assert {head // group for head in range(first, last)} == set(range(kv_first, kv_last))
        counts.append((attention.heads.kv, attention.heads.query))
    assert max(kv for kv, _ in counts) - min(kv for kv, _ in counts) <= 1  # as even as groups allow


@pytest.mark.parametrize("name", sorted(TOGETHER))
def test_norms_over_all_heads_are_cut_by_stages_alone(name: str) -> None:
    config = replace(TINY, architecture=name, numbers={"rope_local_base_freq": 10000.0})
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2: .*over all heads.*pipeline_parallel_size"):
        check_cuts(spec_of(config), layouts(2, 1)[0], gathers=True)
    check_cuts(spec_of(config), layouts(1, 2)[0], gathers=True)


@pytest.mark.parametrize("gathers", [True, False])
def test_one_rank_has_a_shared_expert_or_each_has_a_part(gathers: bool) -> None:
    spec = spec_of(model_config(DENSE["qwen2-moe-normalized"]))
    found = [sharded(spec, layout, gathers=gathers).layers[0].feed_forward for layout in layouts(2, 1)]
    mixtures = [network for network in found if isinstance(network, MoESpec) and network.shared_gate is not None]
    rows = [mixture.shared.gate.shape[0] if mixture.shared else 0 for mixture in mixtures]
    assert rows == ([0, 96] if gathers else [64, 32])


@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"])
def test_each_rank_has_some_key_heads_of_a_gated_delta_net_with_their_value_heads(name: str) -> None:
    values = HYBRIDS["qwen3-next"].to_dict() | {"linear_num_key_heads": 3, "linear_num_value_heads": 6}
    spec = spec_of(config_from_hf(values | {"architectures": [name], "model_type": None}, source="m"))
    whole = {weight: np.arange(math.prod(shape)).reshape(shape) for weight, shape in shapes_of(spec).items()}
    seen: Counter[tuple[str, int]] = Counter()
    states = []
    for layout in layouts(2, 1):
        local = sharded(spec, layout, gathers=False)
        for weight, rows in cut(whole.items(), local):
            if ".linear_attn." in weight:
                seen.update((weight, each) for each in floats(rows).astype(np.int64).ravel().tolist())
        states.append(local.state_layers[0])
    assert [(state.key_heads, state.value_heads) for state in states if isinstance(state, GatedDeltaSpec)] == [
        (2, 4),
        (1, 2),
    ]
    of_all = {weight for weight in whole if ".linear_attn.norm" in weight}
    assert all(count == 1 + (weight in of_all) for (weight, _), count in seen.items())
    assert len(seen) == sum(weights.size for weight, weights in whole.items() if ".linear_attn." in weight)


def test_heads_of_smollm_on_two_ranks() -> None:
    """9 query and 3 KV heads: two groups and one."""
    config = replace(TINY, num_attention_heads=9, num_key_value_heads=3)
    of_ranks = [sharded(spec_of(config), layout, gathers=True).layers[0].attention.heads for layout in layouts(2, 1)]
    assert [(heads.query, heads.kv) for heads in of_ranks] == [(6, 2), (3, 1)]


def test_one_rank_has_the_model_as_it_is() -> None:
    spec = spec_of(TINY)
    assert sharded(spec, Layout(), gathers=False) is spec
    assert sharded(spec, Layout(), gathers=True) is spec


@settings(deadline=None, max_examples=50)
@given(configs(), st.integers(1, 4))
def test_the_largest_stage_is_as_small_as_can_be(config: ModelConfig, count: int) -> None:
    assume(count <= config.num_hidden_layers)
    spec = spec_of(config)
    costs = [sum(math.prod(part.shape) for part in parts_of(layer)) for layer in spec.layers]
    costs[-1] += config.vocab_size * config.hidden_size

    def largest(places: tuple[int, ...]) -> int:
        return max(sum(costs[first:last]) for first, last in itertools.pairwise((0, *places, len(costs))))

    found = stages(spec, count)
    assert [first for first, _ in found[1:]] == [last for _, last in found[:-1]]
    best = min(largest(places) for places in itertools.combinations(range(1, len(costs)), count - 1))
    assert largest(tuple(first for first, _ in found[1:])) == best


def test_experts_to_which_no_token_goes_are_not_counted() -> None:
    """Fifteen layers with a network, and one with 64 experts as large, of which a step of 8 tokens reads about 8."""
    config = replace(
        TINY,
        architecture="Qwen3MoeForCausalLM",
        num_hidden_layers=16,
        dense_layers=tuple(range(15)),
        intermediate_size=4096,
        numbers={"num_experts": 64, "num_experts_per_tok": 1, "moe_intermediate_size": 4096, "norm_topk_prob": True},
    )
    assert stages(spec_of(config), 2) == [(0, 11), (11, 16)]


def test_sizes_and_ranks_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 0"):
        Layout(pipeline_parallel_size=0)
    with pytest.raises(ValueError, match="no rank 4 of 4"):
        Layout(tensor_parallel_size=2, pipeline_parallel_size=2, rank=4)


def test_a_part_that_does_not_come_is_missed() -> None:
    local = sharded(spec_of(TINY), layouts(2, 1)[1], gathers=False)
    weights = [
        (name, weight) for name, weight in cut(random_weights(TINY).items(), local) if "layers.1.mlp.up" not in name
    ]
    with pytest.raises(ModelError, match=r"1 missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        list(checked(weights, TINY, source="m", spec=local))
    with pytest.raises(ModelError, match="misshapen"):  # the whole model's do not pass for a part
        list(checked(random_weights(TINY).items(), TINY, source="m", spec=local))


def pieces(files: ModelFiles, tp: int, pp: int, *, gathers: bool) -> Iterator[tuple[str, tuple[slice, ...], Weight]]:
    for layout in layouts(tp, pp):
        local = sharded(spec_of(files.config), layout, gathers=gathers)
        ranges = {part.weight_name: part.ranges for part in parts_of(local)}
        for name, weight in read_weights(files, local):
            index = tuple(slice(*bounds) for bounds in ranges.get(name) or ((0, size) for size in weight.shape))
            yield name, index, weight


@pytest.mark.parametrize("quantization", ["F32", "Q8_0", "Q4_1", "Q4_K", "Q6_K"])
@pytest.mark.parametrize(("tp", "pp", "gathers"), [(2, 1, False), (3, 2, False), (4, 1, True)])
def test_slices_of_a_gguf_file(tmp_path, quantization: str, tp: int, pp: int, gathers: bool) -> None:
    """Rows of queries and keys, which lie in another order in the file; columns within blocks of 256 too."""
    path = TinyGGUF(tmp_path / "m.gguf").add_tokenizer().add_weights(random_weights(TINY), quantization).save()
    files = open_model(str(path))
    whole = {name: floats(weight) for name, weight in read_weights(files)}
    left = {name: np.ones(weight.shape, bool) for name, weight in whole.items()}
    for name, index, weight in pieces(files, tp, pp, gathers=gathers):
        np.testing.assert_array_equal(floats(weight), whole[name][index])
        left[name][index] = False
    assert not any(places.any() for places in left.values())


def test_slices_of_safetensors(tmp_path) -> None:
    weights = {name: torch.from_numpy(weight).bfloat16() for name, weight in random_weights(TINY).items()}
    path = tmp_path / "model.safetensors"
    save_file(weights, path)
    files = replace(open_model("smollm2-135m-instruct", load_format="dummy"), config=TINY, tensors=(path,))
    left = {name: np.ones(weight.shape, bool) for name, weight in weights.items()}
    for name, index, weight in pieces(files, 3, 2, gathers=False):
        np.testing.assert_array_equal(floats(weight), weights[name][index].float().numpy())
        left[name][index] = False
    assert not any(places.any() for places in left.values())


def test_slices_of_random_weights_are_those_of_one_rank() -> None:
    files = replace(open_model("smollm2-135m-instruct", load_format="dummy"), config=TINY)
    whole = dict(dummy_weights(TINY))
    for name, index, weight in pieces(files, 2, 2, gathers=True):
        np.testing.assert_array_equal(weight, whole[name][index])


@pytest.mark.slow
@pytest.mark.parametrize("gathers", [False, True])
def test_a_rank_of_the_embedded_model_reads_its_part_alone(gathers: bool) -> None:
    """Byte for byte the file's, as views of it; only rows that lie in another order there are copied."""
    files = open_model(str(embedded_gguf()))
    whole = dict(read_weights(files))
    for layout in layouts(3, 1):
        local = sharded(spec_of(files.config), layout, gathers=gathers)
        ranges = {part.weight_name: part.ranges for part in parts_of(local)}
        weights = dict(read_weights(files, local))
        for name, weight in weights.items():
            of_all, (rows, *columns) = whole[name], ranges[name] or ((0, weight.shape[0]), (0, weight.shape[-1]))
            if isinstance(weight, QuantizedRows) and isinstance(of_all, QuantizedRows):
                first, last = (place * of_all.data.shape[-1] // of_all.shape[1] for place in columns[0])
                assert np.array_equal(weight.data, of_all.data[slice(*rows), first:last])
            else:  # norms
                assert np.array_equal(floats(weight), floats(of_all))
        tracemalloc.start()
        for _ in read_weights(files, local):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        copied = weights["model.layers.0.self_attn.q_proj.weight"].nbytes  # as half of it is, on its way
        assert peak < 2 * copied + 2**18


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"])
@pytest.mark.parametrize(("whole", "gathers"), [(True, False), (False, True), (False, False)])
def test_experts_are_spread_whole_or_cut_like_dense_networks(name: str, whole: bool, gathers: bool) -> None:
    own: dict[str, float] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    own |= {"norm_topk_prob": True, "swiglu_alpha": 1.7, "swiglu_limit": 7.0}
    config = replace(TINY, architecture=name, attention_bias=True, num_hidden_layers=1, numbers=own)
    ranks = [Layout(tensor_parallel_size=2, enable_expert_parallel=whole, rank=rank) for rank in range(2)]
    networks = [sharded(spec_of(config), layout, gathers=gathers).layers[0].feed_forward for layout in ranks]
    dense = spec_of(config).layers[0].feed_forward
    assert isinstance(dense, MoESpec)
    first, second = networks
    assert isinstance(first, MoESpec)
    assert isinstance(second, MoESpec)
    assert first.router == second.router == dense.router
    if whole or gathers:
        assert first.experts + second.experts == dense.experts
        assert (first.first, second.first) == (0, 3)
    else:
        inner = dense.experts[0].gate.shape[0]
        assert len(first.experts) == len(second.experts) == 5
        assert [network.experts[4].up.ranges for network in (first, second)] == [
            ((0, inner // 64 * 32), (0, 256)) if inner % 64 == 0 else ((0, 64), (0, 256)),
            ((inner // 64 * 32, inner), (0, 256)) if inner % 64 == 0 else ((64, inner), (0, 256)),
        ]
        assert [network.experts[4].down.bias for network in (first, second)] == [dense.router.bias, False]
    if whole:
        with pytest.raises(ConfigError, match="must not exceed the 5 experts"):
            sharded(spec_of(replace(config, num_attention_heads=8, num_key_value_heads=8)),
                    Layout(tensor_parallel_size=6, enable_expert_parallel=True), gathers=False)  # fmt: skip
