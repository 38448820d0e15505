"""The files of the dense families, as transformers saves them and as GGUF has them: read, they give its logits."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import Mistral3Config, PreTrainedConfig, PreTrainedModel

from gpu.checkpoint import ModelError, ModelFiles, QuantizedRows, open_model
from gpu.checkpoint.hf_config import config_from_hf
from gpu.weights.reading import floats, read_weights
from gpu.weights.tensors import weights_of
from tests.engine.helpers import byte_level_tokenizer
from tests.gpu.dense_gguf import ARCHITECTURES, write_gguf
from tests.gpu.dense_models import DENSE, DENSE_NAMES, GROWING, SHAPE
from tests.gpu.oracles import Runner, assert_logits, build, expected, prompt, with_one_answer

IN_GGUF = [
    name
    for name, config in DENSE.items()
    # Dense layers among mixtures, other normalizations and rotations of local layers are not in such files.
    if config.model_type in ARCHITECTURES and name not in ("qwen2-moe", "qwen2-moe-normalized", "olmo3-yarn")
    and name != "smollm3-window" and name != "glm4-full"
]  # fmt: skip
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
}


def made(config: PreTrainedConfig, kind: Any = transformers.AutoModelForCausalLM) -> PreTrainedModel:
    torch.manual_seed(3)
    oracle = kind.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in oracle.state_dict().items():
            if "norm" in name or name.endswith("bias"):
                parameter.normal_(1.0, 0.3)
    return oracle


def saved(oracle: PreTrainedModel, folder: Path, **more: Any) -> Path:
    oracle.save_pretrained(folder)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | more))
    return folder


def assert_gives(files: ModelFiles, oracle: torch.nn.Module) -> None:
    model = build(files.config)
    model.load_weights(weights_of(files))
    tokens = prompt(0)
    (logits,) = Runner(model).step((tokens, 0, list(range(12))))
    assert_logits(logits, expected(oracle, tokens))


@pytest.mark.parametrize("name", DENSE)
def test_a_directory_gives_the_logits_of_transformers(tmp_path, name):
    oracle = with_one_answer(made(DENSE[name]), 128)
    assert_gives(open_model(str(saved(oracle, tmp_path))), oracle)


@pytest.mark.parametrize("name", IN_GGUF)
def test_a_gguf_file_gives_the_logits_of_transformers(tmp_path, name):
    oracle = with_one_answer(made(DENSE[name]), 128)
    assert_gives(open_model(str(write_gguf(tmp_path / "m.gguf", oracle))), oracle)


@pytest.mark.parametrize("name", ["phi4-mini-long", "glm4", "ministral3"])
def test_rows_of_quantized_files_are_parted_and_reordered_whole(tmp_path, name):
    oracle = made(DENSE[name])
    plain = dict(read_weights(open_model(str(write_gguf(tmp_path / "plain.gguf", oracle)))))
    packed = dict(read_weights(open_model(str(write_gguf(tmp_path / "packed.gguf", oracle, kind="Q8_0")))))
    assert plain.keys() == packed.keys()
    for tensor, weight in packed.items():
        wanted = floats(plain[tensor])
        assert isinstance(weight, QuantizedRows) == (wanted.ndim == 2)
        np.testing.assert_allclose(floats(weight), wanted, atol=float(np.abs(wanted).max()) / 200, err_msg=tensor)


@pytest.mark.parametrize("squeezed", [True, False])
def test_a_gguf_file_has_the_gate_of_a_shared_expert_with_one_or_two_dimensions(tmp_path, squeezed):
    values = DENSE["qwen2-moe"].to_dict() | {"mlp_only_layers": [], "architectures": ["Qwen2MoeForCausalLM"]}
    oracle = made(transformers.Qwen2MoeConfig(**values))
    assert_gives(open_model(str(write_gguf(tmp_path / "m.gguf", oracle, squeezed=squeezed))), oracle)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["mistral", "ministral3"])
def test_the_text_part_of_a_model_that_sees_is_served(tmp_path, caplog, kind, tied):
    rope = {"rope_type": "default", "rope_theta": 500.0} if kind == "mistral" else GROWING
    text = SHAPE | {"model_type": kind, "rope_parameters": rope, "sliding_window": None, "tie_word_embeddings": tied}
    config = Mistral3Config(text_config=text, vision_config=VISION | {"model_type": "pixtral"})
    config.tie_word_embeddings = tied
    oracle = made(config, transformers.AutoModelForImageTextToText)
    with caplog.at_level(logging.INFO):
        files = open_model(str(saved(oracle, tmp_path, tie_word_embeddings=True)))  # the nested value counts
    assert files.config.tie_word_embeddings == tied
    assert "tensors of the vision model are skipped" in caplog.text
    assert_gives(files, oracle)
    # As Mistral names them, of the text part alone.
    weights = load_file(tmp_path / "model.safetensors")
    prefix = "language_model." if any(name.startswith("language_model.") for name in weights) else "model."
    text_only = {
        name.replace("model.language_model.", "language_model.model.").replace("lm_head", "language_model.lm_head")
        if prefix == "model."
        else name: tensor
        for name, tensor in weights.items()
    }
    save_file(text_only, tmp_path / "model.safetensors")
    assert_gives(open_model(str(tmp_path)), oracle)


def published(name: str, **more: Any) -> dict[str, Any]:
    config = DENSE[name]
    return config.to_dict() | {"architectures": [DENSE_NAMES[config.model_type]]} | more


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (published("ministral3", rope_parameters={"rope_type": "default"}), "rope_type='default' is not supported for"),
        (published("phi3-short", original_max_position_embeddings=300), "config.json contradicts itself"),
        (published("phi4-mini-long", head_dim=32), "short_factor must hold a number for each of the 12 pairs"),
        (
            published("phi3", rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.2}),
            "must rotate an even number of a head's 16 dimensions, got 3",
        ),
        (published("granite", attention_bias=True), "attention_bias=true"),
        (published("granite", residual_multiplier=0), "residual_multiplier in config.json must be a number from"),
        (published("granite4", mamba_d_head=17), r"mamba_n_heads \(8\) times mamba_d_head must be"),
        (published("granite4", layer_types=["full_attention", "conv"] * 2), "layer_types in config.json must name"),
        (published("granite4", layer_types=None), "layer_types in config.json must name"),
        (published("smollm3", no_rope_layers=[1, 0]), "no_rope_layers in config.json must hold 0 or 1"),
        (published("smollm3", no_rope_layers=None, no_rope_layer_interval=0), "no_rope_layer_interval in config.json"),
        (published("olmo2", attention_bias=True), "attention_bias=true"),
        (published("olmo3", rope_parameters={"rope_type": "default"}), "rope_parameters in config.json must hold"),
        (published("qwen2-moe", use_sliding_window=True), "use_sliding_window=True"),
    ],
)
def test_a_configuration_that_cannot_be_run_says_why(values, message):
    with pytest.raises(ModelError, match=message):
        config_from_hf(values, source="dense")
