"""Models that transformers computes: which are refused, and why. `tests/golden/test_small_models.py` compares those
that are served with their oracles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.arcee import modeling_arcee

from app.config.settings import Settings
from app.serving.loading import core_factory, open_files
from engine.errors import ConfigError
from gpu.checkpoint import ModelError, open_model, transformers_config
from tests.engine.helpers import byte_level_tokenizer
from tests.gpu.oracles import SMALL
from tests.selection import slow_except

SHAPE = SMALL | {"vocab_size": 271, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


def saved(directory: Path, config: Any, **changes: Any) -> Path:
    """Save a random model, with changes of its config.json."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(directory)
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


def load(directory: Path, **options: Any) -> None:
    given: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 64, "num_threads": 1} | options
    settings = Settings(model=str(directory), **given)
    core_factory(settings, open_files(settings, None))().shutdown()


REFUSED: dict[str, tuple[Any, str]] = {
    "ALiBi": (transformers.BloomConfig(vocab_size=271, hidden_size=48, n_layer=2, n_head=6), "max_position_embeddings"),
    "ALiBi of MPT": (transformers.MptConfig(vocab_size=271, d_model=48, n_layers=2, n_heads=6), "max_position_emb"),
    "attention of its own": (
        transformers.FalconConfig(vocab_size=271, hidden_size=48, num_hidden_layers=2, num_attention_heads=6),
        "0 of 2 layers call the attention function",
    ),
    "two attentions in a layer": (transformers.DiffLlamaConfig(**SHAPE), "layer 0|attends twice|layer 1"),
    "states besides attention": (
        transformers.FalconH1Config(
            **SHAPE, mamba_d_ssm=48, mamba_n_heads=6, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8
        ),
        "'hybrid' of layer_types",
    ),
    "convolutions": (
        transformers.Lfm2Config(**SHAPE, layer_types=["conv", "full_attention", "conv"]),
        "'conv' of layer",
    ),
    "chunked attention": (
        transformers.Llama4TextConfig(
            **SHAPE, attention_chunk_size=8, num_local_experts=2, intermediate_size_mlp=80, no_rope_layers=[1, 1, 1]
        ),
        "'chunked_attention' of layer_types",
    ),
    "latent attention": (
        transformers.DeepseekV2Config(
            **SHAPE | {"num_key_value_heads": 6, "head_dim": 8}, **LATENT, n_routed_experts=2
        ),
        "layer 0 has keys",
    ),
    "rotations by length": (
        transformers.StableLmConfig(
            **SHAPE,
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 1},
        ),
        "rope_type=dynamic",
    ),
}


@pytest.mark.parametrize("name", slow_except(REFUSED, "latent attention", "attention of its own", "convolutions"))
def test_what_paged_attention_does_not_serve_is_refused_by_name(tmp_path: Path, name: str) -> None:
    config, named = REFUSED[name]
    directory = saved(tmp_path, config)
    with pytest.raises(ModelError, match=named):
        load(directory, model_impl="transformers")


@pytest.fixture(scope="module")
def arcee(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(
        tmp_path_factory.mktemp("arcee"), transformers.ArceeConfig(**SHAPE), auto_map={"AutoConfig": "evil.Evil"}
    )


def test_the_log_and_the_facts_say_that_it_is_slow(arcee: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(model=str(arcee), dtype="bfloat16", device="cpu", max_model_len=64, num_threads=1)
    core = core_factory(settings, open_files(settings, None))()
    assert core.config.facts.compute_form.endswith(
        f"bfloat16 weights (transformers {transformers.__version__}, the slow path)"
    )
    assert "ArceeForCausalLM has no record here" in caplog.text
    assert "the code that auto_map names is not run" in caplog.text
    core.shutdown()


def test_settings_that_it_cannot_obey_are_refused(arcee: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for setting, value in (("tensor_parallel_size", 2), ("pipeline_parallel_size", 2), ("executor", "mp")):
        with pytest.raises(ConfigError, match=f"{setting} is .*has one rank"):
            load(arcee, **{setting: value})
    with pytest.raises(ModelError, match="load_format=dummy"):
        load(arcee, load_format="dummy")
    with pytest.raises(ConfigError, match="quantization"):
        load(arcee, quantization="int8")
    with pytest.raises(
        ModelError, match=r"ArceeForCausalLM.*pip install '.\[transformers\]'.*Supported are LlamaForCausalLM"
    ):
        load(arcee, model_impl="headrace")
    monkeypatch.setattr(transformers_config, "find_spec", lambda _: None)
    with pytest.raises(
        ModelError, match=r"ArceeForCausalLM.*pip install '.\[transformers\]'.*Supported are LlamaForCausalLM"
    ):
        load(arcee)
    with pytest.raises(ModelError, match=r"model_impl=transformers cannot work.*pip install"):
        load(arcee, model_impl="transformers")


def test_a_model_with_a_record_is_computed_by_it_unless_the_setting_says_otherwise(tmp_path: Path) -> None:
    directory = saved(tmp_path, transformers.Qwen3Config(**SHAPE))
    assert open_model(str(directory)).config.transformers_dir is None
    assert open_model(str(directory), model_impl="transformers").config.transformers_dir == str(directory)
    load(directory, model_impl="transformers")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["EvilForCausalLM"]}, r"\['EvilForCausalLM'\].*no decoder that the installed transformers"),
        ({"model_type": "evil"}, "no decoder that the installed"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"eos_token_id": 5000}, "EOS token id"),
    ],
)
def test_files_of_another_model_are_refused(arcee: Path, tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    for file in arcee.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(json.loads((arcee / "config.json").read_text()) | changes))
    with pytest.raises(ModelError, match=named):
        load(tmp_path)


def test_tensors_that_are_missing_or_left_over_are_refused_and_pickles_never_opened(
    arcee: Path, tmp_path: Path
) -> None:
    for file in arcee.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(arcee / "model.safetensors")
    lost = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 missing_keys in the checkpoint: model.layers.1.mlp.up_proj.weight"):
        load(tmp_path)
    save_file(
        weights | {"model.layers.1.mlp.up_proj.weight": lost, "extra": lost.clone()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(ModelError, match="unexpected_keys in the checkpoint: extra"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelError, match="is a pickle"):
        load(tmp_path)


def test_a_model_that_mixes_the_tokens_of_a_step_is_refused(arcee: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution would do this, and the attention function would see nothing of it."""
    network = modeling_arcee.ArceeMLP
    forward = network.forward
    monkeypatch.setattr(network, "forward", lambda self, hidden: forward(self, hidden) + 0.5 * hidden.roll(1, dims=-2))
    with pytest.raises(ModelError, match="% off in chunks: it keeps a state, or needs to see a request as a whole"):
        load(arcee)
