"""Quantized safetensors: every layer's numbers are those of the plain formula, and what is not served is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gpu.checkpoint import ModelConfig, ModelError, open_model
from gpu.checkpoint.families.table import spec_of
from gpu.checkpoint.quantized_layers import unpacked
from gpu.cpu.library import load_library
from gpu.cpu.weights import BF16, WeightBuffer, pack
from gpu.sharding import Layout, sharded
from gpu.weights.reading import floats, read_weights
from tests.gpu.checkpoint.test_hf_directory import CONFIG
from tests.gpu.checkpoint_files import TINY, random_weights
from tests.gpu.cpu.test_matrices import stored
from tests.gpu.native_builds import needs_library
from tests.gpu.quantized_checkpoints import FORMATS, ROUNDED, Format, bitsandbytes, compressed, gptq
from tests.selection import slow_except
from tests.support.embedded_model import embedded_gguf

SMALL: ModelConfig = replace(TINY, hidden_size=192, intermediate_size=320, num_attention_heads=3, num_key_value_heads=1)

QUICK = (
    "FP8, 128 x 128",
    "compressed-tensors W8A8, zero points",
    "compressed-tensors NVFP4",
    "AWQ",
    "GPTQ 4 bits, act-order",
    "GPTQ 3 bits",
    "bitsandbytes nf4, nested",
)


def write(path: Path, form: Format, *, config: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """Write a small Llama with quantized layers. Return the weights that it means."""
    path.mkdir()
    sizes = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 3, "num_key_value_heads": 1}
    quantization = form.config if config is None else form.config | config
    (path / "config.json").write_text(
        json.dumps(CONFIG | sizes | {"head_dim": 64, "quantization_config": quantization})
    )
    open_model(str(embedded_gguf())).tokenizer.save(str(path / "tokenizer.json"))
    tensors: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, numbers in random_weights(SMALL).items():
        weight = torch.from_numpy(numbers) / 50
        leaves_out = form.config.get("ignore") or "model.layers.1.mlp*" in form.config.get("exclude_modules", ())
        if "_proj" in name and not (leaves_out and "layers.1.mlp" in name):
            found = form.write(weight)
            tensors |= {name.removesuffix("weight") + kind: tensor for kind, tensor in found.tensors.items()}
            meant[name] = found.meant
        else:
            tensors[name] = meant[name] = weight
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return meant


@pytest.mark.parametrize("name", slow_except(FORMATS, *QUICK))
def test_the_numbers_are_those_of_the_formula_to_the_bit(tmp_path: Path, name: str):
    meant = write(tmp_path / "model", FORMATS[name])
    found = dict(read_weights(open_model(str(tmp_path / "model"))))
    assert found.keys() == meant.keys()
    for key, expected in meant.items():
        np.testing.assert_array_equal(floats(found[key]), expected.numpy(), err_msg=key)


@needs_library
@pytest.mark.parametrize("name", slow_except(FORMATS, *QUICK))
def test_the_c_library_holds_them_exactly_or_as_bfloat16(tmp_path: Path, name: str):
    library = load_library()
    assert library is not None
    meant = write(tmp_path / "model", FORMATS[name])
    for key, weight in read_weights(open_model(str(tmp_path / "model"))):
        if "layers.0" not in key or "_proj" not in key:
            continue
        matrix = pack(library, WeightBuffer(), [weight])
        rounded = any(each in name for each in ROUNDED) and "one group" not in name
        assert (matrix.forms == {BF16}) == rounded
        expected = meant[key].bfloat16().float() if rounded else meant[key]
        assert torch.equal(stored(library, matrix), expected)


@pytest.mark.parametrize(
    "name", ["FP8, 128 x 128", "compressed-tensors NVFP4", "GPTQ 4 bits", "GPTQ 4 bits, act-order"]
)
def test_a_rank_reads_its_part(tmp_path: Path, name: str):
    meant = write(tmp_path / "model", FORMATS[name])
    files = open_model(str(tmp_path / "model"))
    spec = sharded(spec_of(files.config), Layout(tensor_parallel_size=2, rank=1), gathers=False)
    found = dict(read_weights(files, spec))
    down = next(key for key in found if key.endswith("layers.0.mlp.down_proj.weight"))
    np.testing.assert_array_equal(floats(found[down]), meant[down].numpy()[:, 160:])


def test_a_file_of_modelopt_says_how_layers_are_stored_where_the_configuration_does_not(tmp_path: Path):
    meant = write(tmp_path / "model", FORMATS["modelopt FP8"])
    config = json.loads((tmp_path / "model/config.json").read_text())
    quantization = {key: value for key, value in config.pop("quantization_config").items() if key != "quant_method"}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    (tmp_path / "model/hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    for key, weight in read_weights(open_model(str(tmp_path / "model"))):
        np.testing.assert_array_equal(floats(weight), meant[key].numpy(), err_msg=key)


def test_three_bits_run_across_words():
    values = [(7 * i * i + i) % 8 for i in range(32)]
    stream = sum(value << 3 * i for i, value in enumerate(values))
    words = np.array([[stream >> 32 * i & 0xFFFFFFFF for i in range(3)]], np.uint32).view(np.int32)
    assert unpacked(words, 3).tolist() == [values]


def test_stored_zero_points_wrap_around(tmp_path: Path):
    """A zero point of 0 is stored as 15, one less than 0 in 4 bits."""
    path = tmp_path / "model"
    form = gptq(4)
    positive = Format(form.config, lambda weight: form.write(weight.abs()))
    meant = write(path, positive)
    key = "model.layers.0.mlp.up_proj.weight"
    assert meant[key].min() >= 0
    np.testing.assert_array_equal(floats(dict(read_weights(open_model(str(path))))[key]), meant[key].numpy())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"quant_method": "fbgemm_fp8"}, "quant_method='fbgemm_fp8'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo='W4A8_AWQ'.*GGUF"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_8bit=True"),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version='gemv'"),
        ({"quant_method": "gptq", "bits": 5}, "bits=5"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*": {}}}, "dynamic"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"quantization_status": "frozen"}, "quantization_status='frozen'"),
        ({"format": "marlin-24"}, "format='marlin-24'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        ({"ignore": ["re:(a+)+$"]}, "pattern"),
        ({"ignore": []}, "missing|unknown"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, change: dict[str, Any], named: str):
    form = compressed("w4a16", 64)
    if change == {"ignore": []}:  # a layer that is ignored and yet quantized
        form, change = Format(form.config, form.write), {"ignore": ["re:.*q_proj", "re:.*layers[.]1[.]mlp.*"]}
    write(tmp_path / "model", form, config=change)
    with pytest.raises(ModelError, match=named):
        open_model(str(tmp_path / "model"))


@pytest.mark.parametrize("name", ["weight_scale", "weight_zero_point"])
def test_scales_of_another_shape_are_refused(tmp_path: Path, name: str):
    form = compressed("w4a16", 64, symmetric=False)

    def damaged(weight: torch.Tensor):
        found = form.write(weight)
        return found._replace(tensors=found.tensors | {name: found.tensors[name][:-1]})

    write(tmp_path / "model", Format(form.config, damaged))
    with pytest.raises(ModelError, match=rf"_proj\.{name} has the shape"):
        open_model(str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("name", "damage", "named"),
    [
        ("weight.absmax", lambda scales: scales[1:], "weight.absmax has the shape"),
        ("weight", lambda weight: weight[1:], "_proj.weight has the shape"),
        ("weight.nested_absmax", lambda scales: scales[1:], "nested_absmax has the shape"),
        ("weight.quant_map", lambda _: None, "lacks its quant_state or a quant_map"),
        ("weight.nested_quant_map", lambda _: None, "lacks its quant_state or a quant_map"),
        ("weight.quant_state.bitsandbytes__nf4", lambda state: state[1:], "cannot be read"),
        (
            "weight.quant_state.bitsandbytes__nf4",
            lambda _: torch.tensor([*b'{"shape": [0, 4]}']),
            "must name a matrix",
        ),
        (
            "weight.quant_state.bitsandbytes__nf4",
            lambda _: torch.tensor([*b'{"shape": [2, 2, 2, 2], "blocksize": 64, "nested_blocksize": 256}']),
            "must name a matrix",
        ),
    ],
)
def test_damaged_layers_of_bitsandbytes_are_refused(tmp_path: Path, name: str, damage: Any, named: str):
    form = bitsandbytes("nf4", nested=True)

    def damaged(weight: torch.Tensor):
        found = form.write(weight)
        changed = damage(found.tensors[name])
        kept = {key: tensor for key, tensor in found.tensors.items() if key != name}
        return found._replace(tensors=kept if changed is None else kept | {name: changed.to(found.tensors[name].dtype)})

    write(tmp_path / "model", Format(form.config, damaged))
    with pytest.raises(ModelError, match=named):
        open_model(str(tmp_path / "model"))
