"""The JSON files of a Hugging Face directory, within bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu.checkpoint.errors import ModelError

# In bytes. Parsed, a file takes ten times its size and more. The largest tokenizer.json there are have 33 MB, and
# tokenizer_config.json may name every added token; all other files have a few KB.
MAX_JSON = 64 * 2**20
MAX_TOKENIZER_CONFIG = 8 * 2**20
_MAX_SMALL_JSON = 2**20
_MOST_CONTAINERS = 2**20  # objects and arrays: half a million merges are the most there are


def read_text(path: Path, limit: int) -> str:
    """A file of up to `limit` bytes of UTF-8. Raises `ModelError`, and FileNotFoundError if there is none."""
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise ModelError(f"{path} is not a file.")  # reading a pipe would not end
        if size > limit:
            raise ModelError(f"{path} has {size:,} bytes; up to {limit:,} are allowed.")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}. Fetch it anew.") from error


def read_json(path: Path, limit: int = _MAX_SMALL_JSON) -> dict[str, Any]:
    """A JSON object, or an empty one if there is no such file. Raises `ModelError` if it is anything else."""
    try:
        text = read_text(path, limit)
    except FileNotFoundError:
        return {}
    return parse_object(text, str(path))


def parse_object(text: str, source: str) -> dict[str, Any]:
    """`text` as an object whose keys occur once. Raises `ModelError`."""
    if text.count("{") + text.count("[") > _MOST_CONTAINERS:
        raise ModelError(f"{source} cannot be read: it has more than {_MOST_CONTAINERS:,} objects and arrays.")
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ModelError(f"{source} cannot be read: it is nested too deeply. Fetch it anew.") from error
    except ValueError as error:
        raise ModelError(f"{source} cannot be read: {error}. Fetch it anew.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{source} must hold a JSON object, got {type(value).__name__}.")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a key that occurs twice each reader takes another value, so that nobody knows what was checked."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:60]!r} occurs twice")
    return found
