"""A GGUF file gives back the model that went into it: names, row order, numbers and configuration."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu.checkpoint import Embedder, ModelError, RopeScaling, Scorer, open_model
from gpu.weights.tensors import weights_of
from tests.gpu.checkpoint_files import ALPHABET, TINY, TinyGGUF, random_weights
from tests.support.embedded_model import embedded_gguf, read_gguf_once

QWEN2 = replace(TINY, architecture="Qwen2ForCausalLM", attention_bias=True)
QWEN3 = replace(TINY, architecture="Qwen3ForCausalLM", qk_norm=True, head_dim=32, tie_word_embeddings=True)


@pytest.mark.parametrize(
    "config", [TINY, replace(TINY, tie_word_embeddings=True), replace(TINY, attention_bias=True), QWEN2, QWEN3]
)
def test_what_a_converter_wrote_is_read_back_under_its_own_names_and_in_its_own_row_order(tmp_path, config):
    weights = random_weights(config)
    path = TinyGGUF(tmp_path / "m.gguf", config).add_weights(weights).save()

    model = open_model(str(path))
    read = dict(weights_of(model))

    assert model.config == replace(config, torch_dtype="bfloat16")
    assert read.keys() == weights.keys()
    for name, tensor in read.items():
        assert tensor.dtype == torch.float32
        np.testing.assert_array_equal(tensor.numpy(), weights[name], err_msg=name)


def test_a_published_reranker_is_known_by_its_name(tmp_path):
    for config, name, labels in ((QWEN3, "Qwen3-Reranker-0.6B-Q8_0", ("no", "yes")), (QWEN3, "m", ()), (TINY, "m", ())):
        path = TinyGGUF(tmp_path / f"{name}.gguf", config).add_weights(random_weights(config)).save()
        scorer = open_model(str(path)).scorer
        assert (() if scorer is None else scorer.labels) == labels


def rerank_file(path: Path, *, rows: np.ndarray | None = None, config=QWEN3, labels=("yes", "no")) -> Path:
    """Write a decoder with the rows of its labels apart, as converters do; `rows` replace these."""
    weights = random_weights(config)
    tokens = [*ALPHABET[:253], "yes", "th", "no"]
    own = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])[[253, 255]]
    file = TinyGGUF(path, config).add_tokenizer(tokens=tokens).add_weights(weights, "Q8_0")
    file.writer.add_uint32(f"{file.name}.pooling_type", 4)
    file.writer.add_array(f"{file.name}.classifier.output_labels", list(labels))
    file.writer.add_tensor("cls.output.weight", own if rows is None else rows)
    return file.save()


@pytest.mark.parametrize("tied", [True, False])
def test_a_reranker_is_known_by_the_rows_of_its_labels(tmp_path, tied):
    model = open_model(str(rerank_file(tmp_path / "m.gguf", config=replace(QWEN3, tie_word_embeddings=tied))))
    assert model.scorer == Scorer(labels=("no", "yes"), activation="softmax", tokens=("no", "yes"))
    assert model.config.tie_word_embeddings is tied
    assert model.embedder == Embedder()
    assert "cls.output.weight" not in dict(weights_of(model))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": np.random.default_rng(1).standard_normal((2, 256)).astype("f4")},  # of a head that is not tied
        {"rows": np.ones((2, 32), "f4")},
        {"labels": ("no", "yes")},
        {"config": QWEN2},
    ],
)
def test_other_scores_of_decoders_are_refused(tmp_path, wrong):
    with pytest.raises(ModelError, match="Qwen3-Reranker"):
        open_model(str(rerank_file(tmp_path / "m.gguf", **wrong)))


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_a_quantized_model_is_close_to_the_original_in_every_row(tmp_path, quantization):
    weights = random_weights(TINY)
    path = TinyGGUF(tmp_path / "m.gguf").add_weights(weights, quantization).save()
    for name, tensor in weights_of(open_model(str(path))):
        original = torch.from_numpy(weights[name])
        similarity = torch.cosine_similarity(tensor, original, dim=-1)
        assert similarity.min() > 0.98, name


def test_a_model_that_was_read_leaves_nothing_of_its_file_in_memory(tmp_path):
    path = TinyGGUF(tmp_path / "m.gguf").add_weights(random_weights(TINY)).save()
    model = open_model(str(path))
    weights = weights_of(model)
    first = next(weights)
    assert _resident_kib(path) > 0
    dict(weights)
    assert _resident_kib(path) == 0
    again = dict(weights_of(model))
    assert torch.equal(again[first[0]], first[1])


def _resident_kib(path) -> int:
    """How much of a mapped file lies in this process's memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.endswith(str(path)):
            return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))
    raise AssertionError("the file is not mapped")


@pytest.mark.slow
def test_the_embedded_model_has_the_numbers_that_transformers_reads():
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    shape: dict[str, Any] = {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    with torch.device("meta"):
        skeleton = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=49152, tie_word_embeddings=True))
    # The public from_pretrained(..., gguf_file=...) gives the same, but asks for the accelerate package.
    with read_gguf_once():
        checkpoint = load_gguf_checkpoint(str(embedded_gguf()), return_tensors=True, model_to_load=skeleton)
    expected, their_config = checkpoint["tensors"], checkpoint["config"]
    model = open_model(str(embedded_gguf()))

    read = dict(weights_of(model))

    assert read.keys() == expected.keys()
    for name, tensor in read.items():
        assert torch.equal(tensor, expected[name]), name
    for field in {*their_config} & {*vars(model.config)}:
        assert getattr(model.config, field) == pytest.approx(their_config[field]), field
    assert {"num_key_value_heads", "rms_norm_eps", "rope_theta", "head_dim"} <= {*their_config}


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_rope_scaling_is_recovered_from_its_frequencies(tmp_path, factor):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": TINY.rope_theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(head_dim=64, rope_parameters=rope), device="cpu")
    plain = TINY.rope_theta ** -(torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    gguf = TinyGGUF(tmp_path / "m.gguf").add_weights(random_weights(TINY))
    gguf.writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())

    model = open_model(str(gguf.save()))

    near = pytest.approx(factor)  # which equals the float
    assert model.config.rope_scaling == RopeScaling(rope_type="llama3", factor=near)  # type: ignore[arg-type]
    assert len(dict(weights_of(model))) == len(random_weights(TINY))


def test_rope_frequencies_that_are_not_llama_3s_are_refused(tmp_path):
    gguf = TinyGGUF(tmp_path / "m.gguf").add_weights(random_weights(TINY))
    gguf.writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, 32, dtype=np.float32))
    with pytest.raises(ModelError, match="rope_freqs"):
        open_model(str(gguf.save()))


def test_linear_rope_scaling_is_read(tmp_path):
    gguf = TinyGGUF(tmp_path / "m.gguf").add_weights(random_weights(TINY))
    gguf.writer.add_string("llama.rope.scaling.type", "linear")
    gguf.writer.add_float32("llama.rope.scaling.factor", 4.0)
    assert open_model(str(gguf.save())).config.rope_scaling == RopeScaling(rope_type="linear", factor=4.0)


@pytest.mark.parametrize(("number", "pooling"), [(0, None), (1, "mean"), (3, "last")])
def test_how_an_embedder_pools_is_read(tmp_path, number, pooling):
    gguf = TinyGGUF(tmp_path / "m.gguf")
    gguf.writer.add_uint32("llama.pooling_type", number)
    assert open_model(str(gguf.add_weights(random_weights(TINY)).save())).embedder == Embedder(pooling=pooling)


def test_every_end_of_turn_token_ends_generation(tmp_path):
    gguf = TinyGGUF(tmp_path / "m.gguf").add_weights(random_weights(TINY))
    gguf.writer.add_eot_token_id(7)
    assert open_model(str(gguf.save())).config.eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.rope.scaling.type", "longrope", "'longrope' is not supported; supported are linear, yarn and Llama 3"),
        ("llama.expert_count", 8, "metadata llama.expert_used_count must be an integer from 1 to 64 experts, got None"),
        ("split.count", 3, "one of 3 parts, and the others cannot be found by this name"),
        ("llama.pooling_type", 2, "metadata llama.pooling_type=2 is not supported"),
        ("llama.rope.dimension_count", 32, "rope.dimension_count"),
    ],
)
def test_a_model_that_would_be_computed_wrong_is_refused(tmp_path, key, value, message):
    gguf = TinyGGUF(tmp_path / "m.gguf").add_weights(random_weights(TINY))
    gguf.writer.add_string(key, value) if isinstance(value, str) else gguf.writer.add_uint32(key, value)
    with pytest.raises(ModelError, match=message):
        open_model(str(gguf.save()))


def test_an_unsupported_architecture_names_itself_and_what_is_supported(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="architecture 'mamba'; supported in GGUF files are llama, qwen2, qwen3"):
        open_model(str(tmp_path / "m.gguf"))


def test_missing_extra_and_misshapen_tensors_are_refused(tmp_path):
    weights = random_weights(TINY)
    name = "model.layers.1.mlp.up_proj.weight"

    def read(changed):
        return dict(weights_of(open_model(str(TinyGGUF(tmp_path / "m.gguf").add_weights(changed).save()))))

    with pytest.raises(ModelError, match=rf"hold the 21 tensors of a .* 1 missing: {name}\. Fetch"):
        read({key: value for key, value in weights.items() if key != name})
    with pytest.raises(ModelError, match=rf"1 misshapen: {name} is \[256, 256\], needs \[512, 256\]\. Fetch"):
        read(weights | {name: weights[name][:256]})
    with pytest.raises(ModelError, match=r"1 unknown: 'model\.layers\.1\.mlp\.up_proj\.bias'\. Fetch"):
        read(weights | {"model.layers.1.mlp.up_proj.bias": weights[name][:, 0].copy()})


def test_loading_reports_every_tensor(tmp_path):
    path = TinyGGUF(tmp_path / "m.gguf").add_weights(random_weights(TINY)).save()
    reports = []
    list(weights_of(open_model(str(path), progress=lambda *report: reports.append(report))))
    assert reports == [("Loading weights", done, 21) for done in range(1, 22)]
