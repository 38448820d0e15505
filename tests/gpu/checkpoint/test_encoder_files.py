"""Files of encoders: sentence-transformers' modules, vocab.txt, tensors and values that must be refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import BertTokenizer

from engine.messages import Pooling
from gpu.checkpoint import ModelError, open_model
from tests.gpu.encoder_models import ENCODERS, WORDS, cosine, encoded, hidden_states, make_checkpoint, prompts

POOLINGS = ("mean_tokens", "cls_token", "lasttoken", "weightedmean_tokens")
TEXTS = ["The cat, sat on thé mat!", "中a [MASK] unknown", "", "a" * 101, "[SEP] mat"]


def write(directory: Path, name: str, value: object) -> None:
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_text(json.dumps(value))


def add_modules(directory: Path, *modules: str, pooling: str = "mean_tokens", **settings: Any) -> None:
    """Write modules.json and the configuration of the pooling. Modules are Pooling, Dense or Normalize."""
    entries = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, kind in enumerate(modules, start=1):
        folder = f"{index}_{kind}"
        entries.append(
            {"idx": index, "name": str(index), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        )
        if kind == "Pooling":
            modes = {f"pooling_mode_{name}": name == pooling for name in POOLINGS}
            write(directory, f"{folder}/config.json", {"word_embedding_dimension": 32, **modes, **settings})
    write(directory, "modules.json", entries)


def add_dense(directory: Path, folder: str, inputs: int, outputs: int, activation: str, *, bias: bool) -> Any:
    layer = torch.nn.Linear(inputs, outputs, bias=bias)
    values = {"in_features": inputs, "out_features": outputs, "bias": bias}
    write(directory, f"{folder}/config.json", values | {"activation_function": f"torch.nn.modules.{activation}"})
    save_file(
        {f"linear.{name}": each.detach() for name, each in layer.named_parameters()},
        directory / folder / "model.safetensors",
    )
    return layer


def pooled(rows: NDArray[Any], kind: str) -> NDArray[Any]:
    weights = np.arange(1, len(rows) + 1)[:, None]
    kinds = {
        "mean_tokens": rows.mean(0),
        "cls_token": rows[0],
        "lasttoken": rows[-1],
        "weightedmean_tokens": (weights * rows).sum(0) / weights.sum(),
    }
    return kinds[kind]


@pytest.mark.parametrize("kind", POOLINGS)
def test_the_pooling_and_the_dense_layers_of_sentence_transformers_are_obeyed(kind: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, ENCODERS["bert"])
    add_modules(tmp_path, "Pooling", "Dense", "Dense", "Normalize", pooling=kind)
    first = add_dense(tmp_path, "2_Dense", 32, 80, "linear.Identity", bias=False)
    second = add_dense(tmp_path, "3_Dense", 80, 24, "activation.Tanh", bias=True)
    files = open_model(str(tmp_path))
    assert files.config.embedding_size == 24
    found = encoded(files, prompts(), Pooling(files.embedder.pooling or ""))
    for tokens, vector in zip(prompts(), found, strict=True):
        with torch.no_grad():
            wanted = second(first(torch.from_numpy(pooled(hidden_states(model, tokens), kind)).float())).tanh()
        np.testing.assert_allclose(vector, wanted.numpy(), atol=1e-5)


def test_a_prompt_may_be_left_out_of_the_mean(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, ENCODERS["bert"])
    add_modules(tmp_path, "Pooling", include_prompt=False)
    write(tmp_path, "config_sentence_transformers.json", {"prompts": {"query": "the cat "}})
    files, tokens = open_model(str(tmp_path)), prompts()[2]
    assert not files.embedder.pools_prompt
    (vector,) = encoded(files, [tokens], num_unpooled=[3])
    assert cosine(vector, hidden_states(model, tokens)[3:].mean(0)) > 0.999999


def test_the_length_of_prompts_is_that_of_sentence_transformers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, ENCODERS["roberta"])
    assert open_model(str(tmp_path)).config.max_position_embeddings == 66  # two rows are for padding
    add_modules(tmp_path, "Pooling")
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 24})
    assert open_model(str(tmp_path)).config.max_position_embeddings == 24


def test_a_dense_layer_of_every_token_makes_token_vectors(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, ENCODERS["modern-bert"])
    add_modules(tmp_path, "Dense")
    layer = add_dense(tmp_path, "1_Dense", 32, 8, "linear.Identity", bias=False)
    found = encoded(tmp_path, prompts(), Pooling.TOKENS)
    for tokens, vectors in zip(prompts(), found, strict=True):
        with torch.no_grad():
            wanted = layer(torch.from_numpy(hidden_states(model, tokens))).numpy()
        np.testing.assert_allclose(vectors.reshape(-1, 8), wanted, atol=1e-5)


def test_the_layer_of_colbert_makes_token_vectors(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, ENCODERS["bert"])
    config, linear = json.loads((tmp_path / "config.json").read_text()), torch.randn(8, 32)
    write(tmp_path, "config.json", config | {"architectures": ["HF_ColBERT"]})
    tensors = {f"bert.{name}": each for name, each in load_file(tmp_path / "model.safetensors").items()}
    save_file({**tensors, "linear.weight": linear}, tmp_path / "model.safetensors")
    (found,) = encoded(tmp_path, prompts()[2:3], Pooling.TOKENS)
    wanted = hidden_states(model, prompts()[2]) @ linear.numpy().T
    np.testing.assert_allclose(found.reshape(-1, 8), wanted, atol=1e-4)


@pytest.mark.parametrize("lowers", [True, False])
def test_vocab_txt_makes_the_tokenizer_of_transformers(lowers: bool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, ENCODERS["bert"])
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    write(tmp_path, "tokenizer_config.json", {"do_lower_case": lowers, "cls_token": {"content": "[CLS]"}})
    tokenizer = open_model(str(tmp_path)).tokenizer
    theirs = BertTokenizer(vocab=str(tmp_path / "vocab.txt"), do_lower_case=lowers)
    for text in TEXTS:
        assert tokenizer.encode(text).ids == theirs(text)["input_ids"]
    pair, wanted = tokenizer.encode("the cat", "sat"), theirs("the cat", "sat")
    assert (pair.ids, pair.type_ids) == (wanted["input_ids"], wanted["token_type_ids"])
    assert tokenizer.decode(pair.ids) == "the cat sat"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"encoder.layer.1.output.dense.bias": None}, "1 missing: encoder.layer.1.output.dense.bias"),
        ({"encoder.layer.0.attention.self.query.weight": (32, 16)}, "misshapen: encoder.layer.0.attention.self.query"),
        ({"encoder.layer.0.extra.weight": (3,)}, "unknown: 'encoder.layer.0.extra.weight'"),
        ({"pooler.dense.weight": None, "embeddings.position_ids": (1, 66)}, ""),
    ],
)
def test_wrong_tensors_are_named(change: dict[str, tuple[int, ...] | None], match: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, ENCODERS["bert"])
    tensors = load_file(tmp_path / "model.safetensors")
    for name, shape in change.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = torch.zeros(shape, dtype=torch.int64 if "ids" in name else torch.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    if not match:
        open_model(str(tmp_path))
        return
    with pytest.raises(ModelError, match=match):
        open_model(str(tmp_path))


def test_a_classifier_without_its_head_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, ENCODERS["bert"], labels=1)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["bert.pooler.dense.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 missing: pooler\.dense\.weight"):
        open_model(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "values", "match"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ("bert", {"hidden_act": "mish"}, "hidden_act='mish'"),
        ("bert", {"is_decoder": True}, "is_decoder=True"),
        ("bert", {"num_attention_heads": 5}, r"hidden_size \(32\) must be a multiple of num_attention_heads \(5\)"),
        ("bert", {"hidden_size": -1}, "hidden_size must be an integer"),
        ("roberta", {"max_position_embeddings": 2}, "max_position_embeddings=2"),
        ("nomic-bert", {"rotary_scaling_factor": 2.0}, "rotary_scaling_factor=2.0"),
        ("nomic-bert", {"prenorm": True}, "prenorm=True"),
        ("modern-bert", {"layer_types": ["full_attention"]}, "layer_types"),
        ("modern-bert", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type='yarn'"),
    ],
)
def test_a_configuration_that_would_change_the_vectors_is_refused(
    name: str, values: dict[str, Any], match: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, ENCODERS[name])
    config = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path, "config.json", config | values)
    with pytest.raises(ModelError, match=match):
        open_model(str(tmp_path))
