"""A Hugging Face directory as a `ModelFiles`.

It reads config.json, generation_config.json, tokenizer.json, tokenizer_config.json, special_tokens_map.json, the chat
template in any of its three places, and safetensors, sharded or not. Pickled weights are never opened.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from gpu.checkpoint import hf_files
from gpu.checkpoint.config import MAX_CHAT_TEMPLATE, ModelConfig, ModelError, check_chat_template, shown
from gpu.checkpoint.embedder import Embedder, embedder_of_directory
from gpu.checkpoint.families.encoders import (
    encoder_config,
    encoder_family,
    gemma_encoder,
    is_gemma_encoder,
    with_colbert,
)
from gpu.checkpoint.hf_config import config_from_hf, dtype_of, token_ids
from gpu.checkpoint.model_files import HF_KEYS, ModelFiles, default_sampling
from gpu.checkpoint.quantized_layers import BNB_STATE, linear_layers, quantized_layers_of
from gpu.checkpoint.scorer import as_decoder, scorer_of_directory
from gpu.checkpoint.tensors import check_shapes, text_name, unstacked
from gpu.checkpoint.tokenizers import check_steps, check_tokenizer, tokenizer_errors, wordpiece
from gpu.checkpoint.transformers_config import config_from_transformers, is_for_transformers

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_FILE_NAME = re.compile(r"\w[\w. -]{0,200}", re.ASCII)  # a file in the same folder
_COMPARED_AT_ONCE = 2**24  # bytes
_PICKLED = ("*.bin", "*.pt", "*.pth")


def open_hf_directory(directory: Path, *, name: str, with_weights: bool = True, model_impl: str = "auto") -> ModelFiles:
    """Open a directory. Raises `ModelError` if something that serving needs is missing, damaged or unsupported.

    Without `with_weights` only config.json is required; a missing tokenizer raises when it is used.
    """
    if not (directory / "config.json").is_file():
        ggufs = sorted(path.name for path in directory.glob("*.gguf"))
        hint = f" To serve a GGUF file, name it: {directory / ggufs[0]}." if ggufs else ""
        raise ModelError(
            f"{directory} has no config.json, so it is not a Hugging Face model. It must hold config.json, "
            f"*.safetensors and tokenizer.json.{hint}"
        )
    tensors = None
    if with_weights:
        tensors = tuple(weight_files(directory))
        _tokenizer_path(directory)

    tokenizer_config = hf_files.read_json(directory / "tokenizer_config.json", hf_files.MAX_TOKENIZER_CONFIG)
    special_tokens = _special_tokens(directory, tokenizer_config)
    source = str(directory / "generation_config.json")
    generation_config = hf_files.read_json(directory / "generation_config.json")
    eos_token_ids = [
        *token_ids(generation_config, "eos_token_id", source=source),
        *_ids_of(special_tokens.get("eos_token"), directory, tokenizer_config),
    ]
    values = hf_files.read_json(directory / "config.json")
    modelopt = hf_files.read_json(directory / "hf_quant_config.json").get("quantization")
    if isinstance(modelopt, dict):  # earlier files of modelopt do not repeat it in config.json
        values.setdefault("quantization_config", {**modelopt, "quant_method": "modelopt"})
    scorer = scorer_of_directory(directory, values, name)
    values = as_decoder(values) if scorer is not None and scorer.tokens else values
    quantized, encoder = None, encoder_family(values)
    embedder = embedder_of_directory(directory, name, is_encoder=encoder is not None or is_gemma_encoder(values))
    if encoder is not None:
        ends = [*eos_token_ids, *_ids_of(special_tokens.get("sep_token"), directory, tokenizer_config)]
        config = encoder_config(
            *encoder,
            values,
            where=f"{name}, config.json",
            torch_dtype=dtype_of(values, name),
            eos_token_ids=tuple(dict.fromkeys(ends)),
        )
    elif is_gemma_encoder(values):
        config = gemma_encoder(values, eos_token_ids=tuple(eos_token_ids), source=name)
    elif is_for_transformers(values, model_impl):
        config = config_from_transformers(
            directory, values, eos_token_ids=tuple(eos_token_ids), tensors=tensors, source=name
        )
    else:
        config = config_from_hf(values, eos_token_ids=tuple(eos_token_ids), source=name)
        quantized = quantized_layers_of(values, name)
    if config.encoder is not None:
        config = embedder.completed(config)
        for path in (tensors or ()) if values.get("architectures") == ["HF_ColBERT"] else ():
            if (linear := hf_files.read_header(path).get("linear.weight")) is not None:
                config = with_colbert(config, linear.shape[0])
        folders = [*embedder.dense, *embedder.token_dense]
        tensors = tensors and (*tensors, *(path for each in folders for path in weight_files(directory / each)))
    if tensors is not None and config.transformers_dir is None:
        config = _with_head(config, embedder, tensors, source=name)
        has_integers = quantized is not None or config.encoder is not None  # positions of old encoders
        read_header = partial(hf_files.read_header, quantized=has_integers)
        headers = [
            (path, hf_files.of_module(path, tensors) + key, each)
            for path in tensors
            for key, each in read_header(path).items()
        ]
        arrays: Iterator[tuple[str, Any]] = ((key, _stand_in(path, key, each)) for path, key, each in headers)
        if quantized is not None:
            arrays = linear_layers(arrays, quantized, {key for _, key, _ in headers}, name)
        shapes = ((text_name(key), each) for key, each in arrays)
        check_shapes(((key, tensor.shape) for key, tensor in unstacked(shapes, config)), config, source=name)
    return ModelFiles(
        name=name,
        config=config,
        chat_template=_chat_template(directory, tokenizer_config),
        special_tokens=special_tokens,
        load_tokenizer=partial(_load_tokenizer, directory, config.vocab_size),
        tensors=tensors,
        quantized=quantized,
        tokenizer_config=tokenizer_config,
        embedder=embedder,
        scorer=scorer,
        load_sampling=partial(default_sampling, generation_config.get, HF_KEYS, source),
    )


def weight_files(directory: Path) -> list[Path]:
    if (directory / _INDEX).is_file():
        shards = hf_files.read_json(directory / _INDEX, hf_files.MAX_JSON).get("weight_map")
        names = sorted(set(map(str, shards.values()))) if isinstance(shards, dict) else []
        if not names or not all(_FILE_NAME.fullmatch(name) for name in names):
            raise ModelError(f"{directory / _INDEX} must map every tensor to a file of the same folder in weight_map.")
        if missing := [name for name in names if not (directory / name).is_file()]:
            raise ModelError(f"{directory} lacks {missing[0]}, one of {len(missing)} files that {_INDEX} names.")
        return [directory / name for name in names]
    if (directory / "model.safetensors").is_file():
        return [directory / "model.safetensors"]
    # Mistral's repositories hold the weights a second time as consolidated.safetensors, under other names.
    if files := sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith("consolidated")):
        return files
    pickled = sorted(path.name for pattern in _PICKLED for path in directory.glob(pattern))
    hint = f" {pickled[0]} is a pickle, which could run code; convert it to safetensors." if pickled else " Fetch them."
    raise ModelError(
        f"{directory} has no *.safetensors.{hint} For random weights from config.json alone, set the load "
        f"format to 'dummy'."
    )


def _with_head(config: ModelConfig, embedder: Embedder, paths: tuple[Path, ...], *, source: str) -> ModelConfig:
    """Return `config` with `tie_word_embeddings` as the files need it. Each change is logged as a warning.

    If the configuration ties the head to the embedding, but the files have a different head, the head is untied, as in
    transformers. If an embedding model has no head, its head is tied: embeddings need none, so sentence-transformers
    saves none.
    """
    found: dict[str, tuple[Path, hf_files.SafetensorsTensor]] = {}
    for path in paths if config.tie_word_embeddings or embedder.pooling is not None else ():
        found |= {text_name(name): (path, tensor) for name, tensor in hf_files.read_header(path).items()}
    head, embedding = found.get("lm_head.weight"), found.get("model.embed_tokens.weight")
    if head is None and embedding is not None and not config.tie_word_embeddings:
        logger.warning(
            "%s: the files of this embedding model have no lm_head.weight. Embeddings need none; generated text would "
            "be made with the embedding matrix in its place",
            source,
        )
        return replace(config, tie_word_embeddings=True)
    if not config.tie_word_embeddings or head is None or embedding is None or _is_same(head, embedding):
        return config
    logger.warning(
        "%s: tie_word_embeddings is true in config.json, but lm_head.weight is not the embedding: the file's head "
        "is used",
        source,
    )
    return replace(config, tie_word_embeddings=False)


def _stand_in(path: Path, name: str, tensor: hf_files.SafetensorsTensor) -> NDArray[Any]:
    """Return an array of a tensor's shape without its numbers, except for those of bitsandbytes that are a shape."""
    if BNB_STATE in name and tensor.dtype == "U8":
        return np.frombuffer(b"".join(_bytes_of(path, tensor)), np.uint8)
    return np.broadcast_to(np.uint8(0) if tensor.dtype == "U8" else np.float32(0), tensor.shape)


def _is_same(one: tuple[Path, hf_files.SafetensorsTensor], other: tuple[Path, hf_files.SafetensorsTensor]) -> bool:
    if (one[1].shape, one[1].dtype) != (other[1].shape, other[1].dtype):
        return False
    return all(a == b for a, b in zip(_bytes_of(*one), _bytes_of(*other), strict=True))


def _bytes_of(path: Path, tensor: hf_files.SafetensorsTensor) -> Iterator[bytes]:
    left = tensor.num_bytes
    with path.open("rb") as file:
        file.seek(tensor.offset)
        while left > 0:
            yield (some := file.read(min(left, _COMPARED_AT_ONCE)))
            left -= len(some) or left


def _tokenizer_path(directory: Path) -> Path:
    path = directory / "tokenizer.json"
    if not path.is_file() and (directory / "vocab.txt").is_file():
        return directory / "vocab.txt"
    if not path.is_file():
        raise ModelError(
            f"{directory} has no tokenizer.json, the only tokenizer format that is supported. transformers writes it: "
            f"AutoTokenizer.from_pretrained(directory).save_pretrained(directory)."
        )
    return path


def _load_tokenizer(directory: Path, vocab_size: int) -> Tokenizer:
    path = _tokenizer_path(directory)
    with tokenizer_errors(f"{path} cannot be read"):
        text = hf_files.read_text(path, hf_files.MAX_JSON)
        if path.suffix == ".txt":
            config = hf_files.read_json(directory / "tokenizer_config.json", hf_files.MAX_TOKENIZER_CONFIG)
            tokenizer = wordpiece(text.rstrip("\n").split("\n"), config, source=str(path))
        else:
            check_steps(hf_files.parse_object(text, str(path)), str(path))
            tokenizer = Tokenizer.from_str(text)
        # Some tokenizers were saved with their training's truncation and padding, which would truncate prompts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    check_tokenizer(tokenizer, vocabulary, vocab_size, source=str(path))
    return tokenizer


def _chat_template(directory: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """Return the chat template. A separate template file wins over tokenizer_config.json; of several templates, the one
    named "default" is used."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return hf_files.read_text(path, MAX_CHAT_TEMPLATE)
    template, source = hf_files.read_json(directory / "chat_template.json").get("chat_template"), "chat_template.json"
    if not template:
        template, source = tokenizer_config.get("chat_template"), "tokenizer_config.json"
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[-1].get("template") if named else None
    return check_chat_template(template, key=f"chat_template in {source}", source=str(directory))


def _special_tokens(directory: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Return the text of every "..._token" in the tokenizer's files: a string, or the "content" of an object."""
    texts: dict[str, str] = {}
    for key, value in {**hf_files.read_json(directory / "special_tokens_map.json"), **tokenizer_config}.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            texts[key] = text
    return texts


def _ids_of(token: str | None, directory: Path, tokenizer_config: dict[str, Any]) -> list[int]:
    """Return the ids of a special token, without building the tokenizer. Raises `ModelError` for wrong entries."""
    if token is None:
        return []
    listed = tokenizer_config.get("added_tokens_decoder")
    if isinstance(listed, dict):
        entries = [(_number(number), entry) for number, entry in listed.items()]
        source = "added_tokens_decoder in tokenizer_config.json"
    else:
        added = hf_files.read_json(directory / "tokenizer.json", hf_files.MAX_JSON).get("added_tokens") or []
        if not isinstance(added, list):
            raise ModelError(f"{directory}: added_tokens in tokenizer.json must be an array, got {shown(added)}.")
        entries = [(entry.get("id") if isinstance(entry, dict) else None, entry) for entry in added]
        source = "added_tokens in tokenizer.json"
    for number, entry in entries:
        if type(number) is not int or not isinstance(entry, dict):
            raise ModelError(f"{directory}: {source} must hold ids and tokens, got {shown(number)} and {shown(entry)}.")
    return [number for number, entry in entries if number is not None and entry.get("content") == token]


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 20 else None
