"""The recipe of a model's authors for embeddings from its hidden states: the pooling and the prompts.

Both are read from the files of sentence-transformers (modules.json, the folder of its Pooling module and
config_sentence_transformers.json) or from `pooling_type` of a GGUF file. Files that would give other vectors than the
authors' are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpu.checkpoint.config import ModelError, shown
from gpu.checkpoint.hf_files import MAX_JSON, parse_object, read_json, read_text

PoolingKind = Literal["mean", "last"]

_MODES: dict[str, PoolingKind] = {"mean": "mean", "lasttoken": "last"}  # sentence-transformers' names
_FLAGS: dict[str, str] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "lasttoken"}
_GGUF_POOLING: dict[object, PoolingKind | None] = {None: None, 0: None, 1: "mean", 3: "last"}
_UNDERSTOOD = ("Transformer", "Pooling", "Normalize", "LogitScore")  # the last one: `scorer`
_MAX_MODULES = 16


@dataclass(frozen=True, kw_only=True)
class Embedder:
    """The pooling and the prompts in a model's files; empty for a model that only generates text."""

    pooling: PoolingKind | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name
    default_prompt: str | None = None  # the prompt's name for requests that name none


def embedder_of_directory(directory: Path, source: str) -> Embedder:
    """Read modules.json and the files that it names. Raises `ModelError` for a module, a pooling or a prompt that is
    not supported."""
    if not (directory / "modules.json").is_file():
        return Embedder()
    modules = parse_object(f'{{"modules": {read_text(directory / "modules.json", MAX_JSON)}}}', source)["modules"]
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules[:_MAX_MODULES]):
        raise ModelError(f"{source}: modules.json must hold a list of objects, got {shown(modules)}.")
    pooling: PoolingKind | None = None
    settings: dict[str, Any] = {}
    for module in modules[:_MAX_MODULES]:
        kind = str(module.get("type")).rpartition(".")[2]
        if kind not in _UNDERSTOOD or len(modules) > _MAX_MODULES:
            raise ModelError(
                f"{source}: the module {shown(module.get('type'))} of modules.json is not supported; allowed: "
                f"{', '.join(_UNDERSTOOD)}. Without modules.json the model is served, but its vectors lack that module."
            )
        if kind == "Pooling":
            settings = _settings_of(directory, module.get("path"), source)
            pooling = _pooling(settings, source)
    return _with_prompts(directory, pooling, settings, source)


def embedder_of_gguf(value: object, key: str, source: str) -> Embedder:
    """Read a GGUF file's `pooling_type`. Raises `ModelError` for one that is not supported."""
    if isinstance(value, bool) or not isinstance(value, int | None) or value not in _GGUF_POOLING:
        raise ModelError(f"{source}: {key}={shown(value)} is not supported; allowed: 0 (none), 1 (mean), 3 (last).")
    return Embedder(pooling=_GGUF_POOLING[value])


def _settings_of(directory: Path, path: object, source: str) -> dict[str, Any]:
    if not isinstance(path, str) or Path(path).name != path:
        raise ModelError(f"{source}: path of a module in modules.json must be a folder's name, got {shown(path)}.")
    if not (directory / path / "config.json").is_file():
        raise ModelError(f"{source} lacks {path}/config.json, which modules.json names. Fetch the model's files anew.")
    return read_json(directory / path / "config.json")


def _pooling(settings: Mapping[str, Any], source: str) -> PoolingKind:
    flags = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
    named = settings.get("pooling_mode")
    modes = [named] if named is not None else [_FLAGS.get(name, name) for name in flags]
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in _MODES:
        raise ModelError(
            f"{source}: pooling by {', '.join(map(shown, modes)) or 'nothing'} in the configuration of its Pooling "
            f"module is not supported; allowed: one of {' and '.join(_MODES)}."
        )
    return _MODES[modes[0]]


def _with_prompts(directory: Path, pooling: PoolingKind | None, settings: Mapping[str, Any], source: str) -> Embedder:
    found = read_json(directory / "config_sentence_transformers.json")
    prompts, default = found.get("prompts") or {}, found.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{source}: prompts in config_sentence_transformers.json must be an object of strings.")
    if default is not None and default not in prompts:
        raise ModelError(
            f"{source}: default_prompt_name={shown(default)} in config_sentence_transformers.json is not one "
            f"of its prompts."
        )
    if settings.get("include_prompt", True) is not True and any(prompts.values()):
        raise ModelError(f"{source}: include_prompt=false of its Pooling module is not supported.")
    return Embedder(pooling=pooling, prompts=prompts, default_prompt=default)
