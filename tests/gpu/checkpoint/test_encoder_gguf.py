"""GGUF files of encoders, written as llama.cpp's converter writes them, have the vectors of their checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import XLMRobertaTokenizer

from engine.messages import Pooling
from gpu.checkpoint import ModelError, open_model
from gpu.checkpoint.gguf_file import GGUFFile
from gpu.checkpoint.gguf_tokenizer import tokenizer_from_gguf
from gpu.checkpoint.scorer import scorer_of_labels
from tests.gpu.checkpoint_files import byte_alphabet
from tests.gpu.encoder_models import ENCODERS, WORDS, encoded, make_checkpoint, prompts, word_tokenizer

KINDS = {
    "bert": "bert",
    "roberta": "bert",
    "distilbert": "bert",
    "nomic-bert": "nomic-bert",
    "modern-bert": "modern-bert",
    "modern-bert-with-biases": "modern-bert",
    "embedding-gemma": "gemma-embedding",
}
CHARSMAP = (1024).to_bytes(4, "little") + bytes(1024)  # a trie that maps no letter
SKIPPED = ("pooler.", "embeddings.position_ids")


def write_gguf(
    path: Path,
    directory: Path,
    name: str,
    pooling: int = 1,
    *,
    labels: Sequence[str] = (),
    head_pooling: int = 0,
    **more: np.ndarray,
) -> Path:
    """Write the checkpoint of `ENCODERS[name]` in `directory` as a GGUF file. `labels` and `head_pooling` are those of
    its classification head, `more` are further tensors."""
    config, kind = ENCODERS[name], KINDS[name]
    writer = gguf.GGUFWriter(str(path), kind)
    offset = (config.pad_token_id or 0) + 1 if name == "roberta" else 0
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings - offset)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", None) or config.hidden_dim)
    writer.add_head_count(config.num_attention_heads)
    writer.add_pooling_type(gguf.PoolingType(pooling))
    if kind == "gemma-embedding":
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_sliding_window(8)
        writer.add_rope_freq_base(1e6)
        writer.add_array(f"{kind}.attention.sliding_window_pattern", [True, False, True])
    else:
        writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", getattr(config, "norm_eps", 1e-12)))
    if kind == "nomic-bert":
        writer.add_rope_freq_base(1000.0)
    if kind == "modern-bert":
        writer.add_rope_freq_base(160000.0)
        writer.add_sliding_window(config.local_attention)
        writer.add_sliding_window_pattern(3)
        writer.add_string(f"{kind}.hidden_activation", config.hidden_activation)
    if labels:
        writer.add_array(f"{kind}.classifier.output_labels", list(labels))
    if head_pooling:
        writer.add_uint32(f"{kind}.classifier.pooling_type", head_pooling)
    writer.add_tokenizer_model("bert")
    special = WORDS[:5]
    spelled = [word if word in special else word[2:] if word.startswith("##") else f"\u2581{word}" for word in WORDS]
    writer.add_token_list(spelled)
    writer.add_token_types([3 if word in special else 1 for word in WORDS])
    for key, index in (("unknown", 1), ("cls", 2), ("seperator", 3), ("padding", 0)):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", index)
    architecture = {text: each for each, text in gguf.MODEL_ARCH_NAMES.items()}[kind]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for given, values in load_file(directory / "model.safetensors").items():
        in_hf = given.removeprefix("bert.").removeprefix("roberta.").removeprefix("distilbert.")
        if in_hf.startswith(SKIPPED):
            continue
        if kind == "modern-bert":
            in_hf = in_hf.removeprefix("model.")
        if in_hf in ("classifier.weight", "classifier.bias"):
            in_hf = in_hf.replace("classifier", "classifier.out_proj")
        if in_hf == "embeddings.position_embeddings.weight":
            rows = values[offset:]
        else:
            rows = values + 1 if kind == "gemma-embedding" and in_hf.endswith("norm.weight") else values
        found = names.get_name(in_hf, try_suffixes=(".weight", ".bias"))
        assert found is not None, in_hf
        writer.add_tensor(found, np.ascontiguousarray(rows))
    for added, values in more.items():
        writer.add_tensor(f"{added}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "name", [name if name == "bert" else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]
)
def test_vectors_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, ENCODERS[name])
    file = write_gguf(tmp_path / "model.gguf", tmp_path, name)
    files = open_model(str(file))
    assert files.embedder.pooling == "mean"
    given = [[token for token in each if token != 1] for each in prompts()]  # RoBERTa's padding has no other position
    for vector, wanted in zip(encoded(files, given), encoded(tmp_path, given), strict=True):
        np.testing.assert_allclose(vector, wanted, atol=1e-5)
    for text in ("The cat, sat on the mat!", "unknown 中"):
        assert files.tokenizer.encode(text).ids == word_tokenizer().encode(text).ids


def test_dense_layers_and_heads_are_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, ENCODERS["embedding-gemma"])
    weights: dict[str, Any] = {
        "dense_2": np.random.rand(40, 32).astype("f4"),
        "dense_3": np.random.rand(8, 40).astype("f4"),
    }
    files = open_model(str(write_gguf(tmp_path / "model.gguf", tmp_path, "embedding-gemma", **weights)))
    plain, (found,) = encoded(tmp_path, prompts()[1:2])[0], encoded(files, prompts()[1:2])
    np.testing.assert_allclose(found, weights["dense_3"] @ weights["dense_2"] @ plain, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "labels", "head_pooling"),
    [
        ("roberta", (), 0),
        pytest.param("distilbert", ("bad", "fair", "good"), 0, marks=pytest.mark.slow),
        pytest.param("modern-bert", ("LABEL_0",), 2, marks=pytest.mark.slow),
        ("modern-bert-with-biases", ("bad", "good"), 1),
    ],
)
def test_a_head_has_the_logits_of_its_checkpoint(
    name: str, labels: Sequence[str], head_pooling: int, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, ENCODERS[name], labels=len(labels) or 1)
    files = open_model(
        str(write_gguf(tmp_path / "m.gguf", tmp_path, name, 4, labels=labels, head_pooling=head_pooling))
    )
    assert files.scorer == scorer_of_labels(tuple(labels) or ("LABEL_0",))
    given = [[token for token in each if token != 1] for each in prompts()]
    for logits, wanted in zip(
        encoded(files, given, Pooling.CLASSIFY), encoded(tmp_path, given, Pooling.CLASSIFY), strict=True
    ):
        np.testing.assert_allclose(logits, wanted, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "modern-bert"])
def test_a_head_of_which_the_file_lacks_a_part_is_refused(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, ENCODERS[name], labels=3)
    with pytest.raises(ModelError, match=r"pooler of BERT's.*\.classifier\.pooling_type"):
        open_model(str(write_gguf(tmp_path / "m.gguf", tmp_path, name, labels=("a", "b", "c"))))


def test_labels_fit_the_head(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, ENCODERS["roberta"], labels=3)
    with pytest.raises(ModelError, match=r"output_labels has 2 labels, the head has 3"):
        open_model(str(write_gguf(tmp_path / "m.gguf", tmp_path, "roberta", labels=("a", "b"))))


def _finish(writer: gguf.GGUFWriter, **special: int) -> None:
    """Write the file of a vocabulary that adds these special tokens to each text."""
    for key, value in special.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", value)
        writer.add_bool(f"tokenizer.ggml.add_{key}_token", True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_pairs_of_modern_bert_begin_once(tmp_path: Path) -> None:
    tokens = [*byte_alphabet(), "th", "[CLS]", "[SEP]"]
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "modern-bert")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("modern-bert")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3, 3])
    writer.add_token_merges(["t h"])
    _finish(writer, bos=257, eos=258)
    tokenizer = tokenizer_from_gguf(GGUFFile(tmp_path / "m.gguf"), 259)
    assert tokenizer.encode("th", "a").tokens == ["[CLS]", "th", "[SEP]", "a", "[SEP]"]


def test_a_unigram_vocabulary_makes_the_tokenizer_of_transformers(tmp_path: Path) -> None:
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "\u2581", "\u2581the", "\u2581c", "at", "s", "a", "t", "\u2581at"]
    vocabulary = [(piece, -0.5 * index if index > 3 else 0.0) for index, piece in enumerate(pieces)]
    writer = gguf.GGUFWriter(str(tmp_path / "vocabulary.gguf"), "bert")
    writer.add_tokenizer_model("t5")
    writer.add_token_list(pieces)
    writer.add_token_scores([score for _, score in vocabulary])
    writer.add_token_types([3, 3, 3, 2, *[1] * 8])
    writer.add_array("tokenizer.ggml.precompiled_charsmap", list(CHARSMAP))
    _finish(writer, bos=0, eos=2)
    tokenizer = tokenizer_from_gguf(GGUFFile(tmp_path / "vocabulary.gguf"), 13)
    theirs = XLMRobertaTokenizer(vocab=vocabulary, _spm_precompiled_charsmap=cast(Any, CHARSMAP))
    for text in ("the cat sat", "  the   cat at", "the dog", ""):
        assert tokenizer.encode(text).ids == theirs(text)["input_ids"]
    assert tokenizer.encode("the", "cat").ids == theirs("the", "cat")["input_ids"]
    assert tokenizer.decode(tokenizer.encode("the cat").ids) == "the cat"


@pytest.mark.parametrize(("wrong", "match"), [({"extra": np.zeros((2, 2), "f4")}, r"unknown: 'extra\.weight'")])
def test_an_unknown_tensor_is_named(wrong: dict[str, Any], match: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, ENCODERS["bert"])
    with pytest.raises(ModelError, match=match):
        open_model(str(write_gguf(tmp_path / "model.gguf", tmp_path, "bert", **wrong)))
