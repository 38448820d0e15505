"""The files of models with latent attention, as transformers saves them and as GGUF has them, and what is refused."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, PreTrainedConfig

from engine.errors import ConfigError
from gpu.checkpoint import ModelError, open_model
from gpu.checkpoint.families.table import spec_of
from gpu.checkpoint.hf_config import config_from_hf
from gpu.kv_cache import kv_cache_size
from gpu.model_loader import check_kv_cache_dtype, check_ranks
from gpu.runner.runner import WorkerOptions
from gpu.sharding import Layout, sharded
from gpu.weights.reading import floats, read_weights
from tests.gpu.checkpoint.test_dense_files import assert_gives, made, saved
from tests.gpu.deepseek_models import DEEPSEEK, DEEPSEEK_NAMES, LATENT
from tests.gpu.dense_gguf import write_gguf
from tests.gpu.dense_models import YARN
from tests.gpu.quantized_checkpoints import fp8
from tests.selection import slow_except

EQUAL = YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}  # GGUF files have one of both


def in_gguf(name: str) -> PreTrainedConfig:
    values = DEEPSEEK[name].to_dict()
    if values["rope_parameters"]["rope_type"] == "yarn":
        values |= {"rope_parameters": EQUAL}
    if name == "glm-flash":
        values |= {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
    return type(DEEPSEEK[name])(**values)


@pytest.mark.parametrize("name", slow_except(DEEPSEEK, "deepseek-v3"))
def test_a_directory_gives_the_logits_of_transformers(tmp_path, caplog, name):
    """Published checkpoints have a layer for multi-token prediction after the model's own."""
    oracle = made(DEEPSEEK[name])
    weights_file = saved(oracle, tmp_path) / "model.safetensors"
    further = {f"model.layers.4.{part}.weight": torch.ones(2, 2) for part in ("eh_proj", "self_attn.o_proj")}
    save_file(load_file(weights_file) | further, weights_file)
    with caplog.at_level(logging.INFO):
        files = open_model(str(tmp_path))
    assert [record.message for record in caplog.records if "2 tensors of multi-token prediction" in record.message]
    assert_gives(files, oracle)
    save_file(load_file(weights_file) | {"model.layers.5.norm.weight": torch.ones(2)}, weights_file)
    with pytest.raises(ModelError, match=r"1 unknown: 'model.layers.5.norm.weight'"):
        open_model(str(tmp_path))


IN_GGUF = [(name, split) for name in DEEPSEEK if "moe" not in name and "direct" not in name for split in (True, False)]


@pytest.mark.parametrize(("name", "split"), slow_except(IN_GGUF, ("deepseek-v3", True)))
def test_a_gguf_file_gives_the_logits_of_transformers(tmp_path, name, split):
    oracle = made(in_gguf(name))
    assert_gives(open_model(str(write_gguf(tmp_path / "m.gguf", oracle, split=split))), oracle)


def test_fp8_with_a_scale_for_each_block_is_read_as_what_it_means(tmp_path):
    form = fp8("block")
    weights_file = saved(made(DEEPSEEK["deepseek-v3"]), tmp_path, quantization_config=form.config) / "model.safetensors"
    packed: dict[str, Any] = {}
    meant: dict[str, Any] = {}
    for name, weight in load_file(weights_file).items():
        if name.endswith(("_proj.weight", "_mqa.weight")):
            written = form.write(weight)
            packed |= {name.removesuffix("weight") + kind: tensor for kind, tensor in written.tensors.items()}
            meant[name] = written.meant
        else:
            packed[name] = meant[name] = weight
    save_file(packed, weights_file)
    found = dict(read_weights(open_model(str(tmp_path))))
    assert found.keys() == meant.keys()
    for name, read in found.items():
        np.testing.assert_array_equal(floats(read), meant[name].float().numpy(), err_msg=name)


def published(name: str, **changes: Any) -> dict[str, Any]:
    config = DEEPSEEK[name]
    return config.to_dict() | {"architectures": [DEEPSEEK_NAMES[config.model_type]]} | changes


def test_kimi_k2_is_a_deepseek_v3():
    config = config_from_hf(published("deepseek-v3", model_type="kimi_k2"), source="kimi")
    assert config == config_from_hf(published("deepseek-v3"), source="v3")


def test_the_defaults_are_those_of_transformers():
    values = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "intermediate_size": 64}
    values |= {"vocab_size": 96, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 128}
    values |= {"max_position_embeddings": 512}
    config, theirs = config_from_hf(values, source="v3"), DeepseekV3Config()
    own = {"num_experts": "n_routed_experts"}
    assert config.numbers == {name: getattr(theirs, own.get(name, name)) for name in config.numbers}
    assert config.head_dim == theirs.qk_rope_head_dim


def test_a_token_takes_one_latent_and_one_rotated_key():
    config = config_from_hf(published("deepseek-v3"), source="v3")
    size = kv_cache_size(
        config,
        element_size=4,
        block_size=16,
        max_num_seqs=1,
        max_model_len=64,
        budget=2**20,
        kv_cache_memory=None,
    )
    numbers = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
    assert size.bytes_per_block == config.num_hidden_layers * 16 * numbers * 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (published("deepseek-v3", n_group=3), r"n_group \(3\) must divide the 8 experts"),
        (published("deepseek-v3", topk_group=5), r"topk_group \(5\)"),
        (published("deepseek-v3", num_experts_per_tok=5), r"num_experts_per_tok \(5\)"),
        (published("deepseek-v3", num_key_value_heads=2), r"num_key_value_heads \(2\) must be num_attention_heads"),
        (published("deepseek-v3", q_lora_rank=0), "q_lora_rank must be a positive number or null"),
        (published("deepseek-v3", scoring_func="softmax"), "scoring_func='softmax'"),
        (published("deepseek-v3", moe_layer_freq=2), "moe_layer_freq=2"),
        (published("deepseek-v3", attention_bias=True), "attention_bias=true"),
        (published("deepseek-v3", rope_parameters={"rope_type": "linear", "factor": 2.0}), "RoPE scaling 'linear'"),
        (published("deepseek-v2", topk_method="noaux_tc"), "topk_method='noaux_tc'"),
        (published("deepseek-v2", topk_method=None), "must be greedy, or group_limited_greedy .* got None"),
        (published("deepseek-v2", n_group=None), "group_limited_greedy with n_group"),
        (published("deepseek-v2", norm_topk_prob=True), "norm_topk_prob=True"),
        (published("glm-flash", mlp_layer_types=["dense", "both", "dense", "sparse"]), "mlp_layer_types"),
        (published("glm-flash", first_k_dense_replace=2), "first_k_dense_replace=2"),
    ],
)
def test_a_configuration_that_cannot_be_run_says_why(values, message):
    with pytest.raises(ModelError, match=message):
        config_from_hf(values, source="deepseek")


def test_several_ranks_with_latent_attention_are_refused_on_cuda_by_name():
    spec = spec_of(config_from_hf(published("deepseek-v3"), source="v3"))
    for device, has_tensor_ranks in (("cpu", True), ("cuda:0", False)):
        check_ranks(spec, device, has_tensor_ranks)
    stage = sharded(spec, Layout(pipeline_parallel_size=2), gathers=False)
    for part, has_tensor_ranks in ((spec, True), (stage, False)):
        with pytest.raises(ConfigError, match="models with latent attention or states.* have one rank on CUDA"):
            check_ranks(part, "cuda:0", has_tensor_ranks)


def test_fp8_keys_and_values_without_kernels_are_refused_by_name():
    with pytest.raises(ConfigError, match="kv_cache_dtype is fp8.* here torch computes on cuda:0"):
        check_kv_cache_dtype(WorkerOptions(kv_cache_dtype="fp8"), None, "cuda:0", has_kernels=False)
