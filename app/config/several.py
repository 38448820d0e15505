"""The settings of several models in one server: a table for each, or a folder of models."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from pydantic import ByteSize, ValidationError

from app.config.settings import MIB, Settings, SettingsError

_warn = cache(logging.getLogger(__name__).warning)  # once, however often the folder is read

KV_OF_SEVERAL = 512 * MIB  # bytes of the KV cache of one of several models, unless it is given

_NAMES = list(Settings.model_fields)
# What a model's table may set: everything about model and engine, and these settings of the server.
PER_MODEL = {*_NAMES[: _NAMES.index("models")]} - {"engine", "cache_dir"} | {
    *("path", "memory", "pinned", "idle_unload", "template_kwargs", "template_timeout", "embedding_pooling"),
    *("max_queued_requests", "max_queued_tokens", "max_queue_time", "default_timeout", "default_ttft_timeout"),
}
_NOT_SHARED = {"models", "models_dir", "memory", "model", "engine"}


def check_models(settings: Settings) -> Settings:
    """Return the settings if the tables of their models are right. Raises SettingsError."""
    if not settings.has_several_models:
        return settings
    if settings.engine == "thread" and "engine" in settings.model_fields_set:
        raise SettingsError("engine: got thread; several models always have processes. What works: no engine")
    for name in ("gguf_file", "served_model_name"):
        if getattr(settings, name):
            raise SettingsError(f"{name} belongs to one model, and there are several. What works: {name} in its table")
    for name, table in settings.models.items():
        for key in table.keys() - PER_MODEL:
            what = "is a setting of the whole server" if key in _NAMES else "is not a setting"
            raise SettingsError(f"models.{name}: {key} {what}. What works: leave it out of the model's table")
    every = [name for each in settings_of_models(settings, {}) for name in each.model_names]
    if twice := next((name for name in every if every.count(name) > 1), None):
        raise SettingsError(f"models: two models have the name {twice!r}. What works: a name for each")
    return settings


def settings_of_models(settings: Settings, found: Mapping[str, str] | None = None) -> list[Settings]:
    """Return the settings of each of several models: the server's, with those of its table. `found` are more models by
    name, by default those in `models_dir`. Raises SettingsError."""
    if found is None:
        found = {} if settings.models_dir is None else models_in(settings.models_dir)
    shared = {name: getattr(settings, name) for name in settings.model_fields_set - _NOT_SHARED}
    if "model" in settings.model_fields_set and settings.model not in (
        each.get("model") for each in settings.models.values()
    ):
        found = {Settings(model=settings.model).model_names[0]: settings.model, **found}
    every = []
    for name in dict.fromkeys([*settings.models, *found]):
        table = dict(settings.models.get(name, {}))
        model = str(table.pop("path", None) or table.get("model") or found.get(name, name))
        names = table.get("served_model_name") or ((name,) if name != model else ())
        try:
            own = Settings(**shared | table | {"model": model, "served_model_name": names, "engine": "process"})
        except ValidationError as error:
            problem = error.errors()[0]
            raise SettingsError(f"models.{name}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
        if own.kv_cache_memory is None and own.memory is None:
            own = own.model_copy(update={"kv_cache_memory": ByteSize(KV_OF_SEVERAL)})
        every.append(own)
    return every


def models_in(folder: Path) -> dict[str, str]:
    """Return the models in a folder by name: GGUF files, of split ones the first part, and checkpoint folders. Raises
    SettingsError if it cannot be read."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise SettingsError(f"models_dir: cannot read {folder}: {error.strerror}. It must be a folder") from error
    found: dict[str, str] = {}
    for path in entries:
        try:
            path.name.encode()
            is_file, is_checkpoint = path.is_file(), (path / "config.json").is_file()
        except (OSError, UnicodeError) as error:
            _warn(f"models_dir: {str(path)!r} is left out: {error}")
            continue
        name, _, part = path.stem.rpartition("-00001-of-")
        if path.suffix.lower() == ".gguf" and is_file:
            if not re.search(r"-\d{5}-of-\d{5}$", path.stem):
                found[path.stem] = str(path)
            elif part:
                found[name] = str(path)
        elif is_checkpoint:
            found[path.name] = str(path)
    return found
