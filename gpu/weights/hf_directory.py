"""A Hugging Face directory as a `ModelFiles`. Torch-free until a weight is drawn.

Read are config.json, generation_config.json, tokenizer.json, tokenizer_config.json, special_tokens_map.json, the chat
template in any of its three places, and safetensors, sharded or not. Pickled weights are never opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from gpu.weights.errors import ModelError
from gpu.weights.hf_config import config_from_hf, token_ids
from gpu.weights.model_files import ModelFiles

if TYPE_CHECKING:
    import torch

_INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth")


def open_hf_directory(directory: Path, *, name: str, with_weights: bool = True) -> ModelFiles:
    """Open a directory. Raises `ModelError` if something that serving needs is missing, damaged or unsupported.

    Without `with_weights` only config.json need be there; a tokenizer that is missing shows when it is asked for.
    """
    if not (directory / "config.json").is_file():
        ggufs = sorted(path.name for path in directory.glob("*.gguf"))
        hint = f" To serve a GGUF file, name it: {directory / ggufs[0]}." if ggufs else ""
        raise ModelError(
            f"{directory} has no config.json, so it is not a Hugging Face model. It must hold config.json, "
            f"*.safetensors and tokenizer.json.{hint}"
        )
    if with_weights:
        _weight_files(directory)
        _tokenizer_path(directory)

    tokenizer_config = _read_json(directory / "tokenizer_config.json")
    special_tokens = _special_tokens(directory, tokenizer_config)
    eos_token_ids = [
        *token_ids(_read_json(directory / "generation_config.json").get("eos_token_id")),
        *_ids_of(special_tokens.get("eos_token"), directory, tokenizer_config),
    ]
    return ModelFiles(
        name=name,
        config=config_from_hf(_read_json(directory / "config.json"), eos_token_ids=tuple(eos_token_ids), source=name),
        chat_template=_chat_template(directory, tokenizer_config),
        special_tokens=special_tokens,
        load_tokenizer=partial(_load_tokenizer, directory),
        read_weights=partial(_read_weights, directory),
    )


def _read_weights(directory: Path, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of all files, wherever they are wanted: views of the mapped files, which stay mapped as long as
    the tensors live. They come in the order in which they lie, so that a disk reads on."""
    for path in _weight_files(directory):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.offset_keys():
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise ModelError(
                f"{path} cannot be read: {error}. The download may be incomplete; fetch it anew."
            ) from error


def _weight_files(directory: Path) -> list[Path]:
    if (directory / _INDEX).is_file():
        shards = _read_json(directory / _INDEX).get("weight_map")
        names = sorted({str(shard) for shard in shards.values()}) if isinstance(shards, dict) else []
        if not names or any(Path(name).name != name for name in names):
            raise ModelError(f"{directory / _INDEX} must map every tensor to a file beside it in weight_map.")
        if missing := [name for name in names if not (directory / name).is_file()]:
            raise ModelError(f"{directory} lacks {missing[0]} and {len(missing) - 1} more files that {_INDEX} names.")
        return [directory / name for name in names]
    if (directory / "model.safetensors").is_file():
        return [directory / "model.safetensors"]
    # Mistral's repositories hold the weights a second time as consolidated.safetensors, under other names.
    if files := sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith("consolidated")):
        return files
    pickled = sorted(path.name for pattern in _PICKLED for path in directory.glob(pattern))
    hint = f" {pickled[0]} is a pickle, which could run code; convert it to safetensors." if pickled else ""
    raise ModelError(
        f"{directory} has no *.safetensors.{hint} For random weights from config.json alone, set the load "
        f"format to 'dummy'."
    )


def _tokenizer_path(directory: Path) -> Path:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{directory} has no tokenizer.json, the only tokenizer format that is supported. transformers writes it: "
            f"AutoTokenizer.from_pretrained(directory).save_pretrained(directory)."
        )
    return path


def _load_tokenizer(directory: Path) -> Tokenizer:
    path = _tokenizer_path(directory)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise ModelError(f"{path} cannot be read: {error}. Fetch it anew.") from error
    # Some were saved with the truncation and padding of their training run, which would cut prompts in silence.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _chat_template(directory: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """A file of its own comes before tokenizer_config.json, and of several templates the one named "default" counts."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = _read_json(directory / "chat_template.json").get("chat_template") or tokenizer_config.get(
        "chat_template"
    )
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(directory: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Every "..._token" of the tokenizer's files; its value is a text or an object with the text as "content"."""
    texts: dict[str, str] = {}
    for key, value in {**_read_json(directory / "special_tokens_map.json"), **tokenizer_config}.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            texts[key] = text
    return texts


def _ids_of(token: str | None, directory: Path, tokenizer_config: dict[str, Any]) -> list[int]:
    """The id of a special token, without building the tokenizer."""
    if token is None:
        return []
    listed = tokenizer_config.get("added_tokens_decoder")
    if isinstance(listed, dict):
        return [int(number) for number, entry in listed.items() if number.isdecimal() and entry.get("content") == token]
    added = _read_json(directory / "tokenizer.json").get("added_tokens") or []
    return [entry["id"] for entry in added if entry.get("content") == token]


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one if there is no such file. Raises `ModelError` if it is anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}. Fetch it anew.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(value).__name__}.")
    return value
