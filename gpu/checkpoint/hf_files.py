"""JSON files and safetensors headers, read within bounds.

A safetensors file (github.com/huggingface/safetensors) has a u64 with the length of the header, the header as a JSON
object of name -> {dtype, shape, data_offsets}, and the data, which the tensors cover without a hole. Shapes are
compared with the configuration before anything is allocated.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.checkpoint.config import ModelError, shown

_PLAIN_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "U8": 1}
_ITEM_SIZES = _PLAIN_SIZES | {"F8_E4M3": 1, "I8": 1, "I32": 4, "I64": 8}  # with those of quantized checkpoints
_MAX_DIMENSIONS = 5  # a vision model's patches have five; other tensors have up to three


@dataclass(frozen=True)
class SafetensorsTensor:
    """The shape, type and place of a tensor."""

    shape: tuple[int, ...]
    dtype: str  # a key of `_ITEM_SIZES`
    offset: int  # from the start of the file, bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_SIZES[self.dtype]


def read_header(path: Path, *, quantized: bool = True) -> dict[str, SafetensorsTensor]:
    """Return every tensor by its name. Raises `ModelError` for a header that is damaged or contradicts the file, or has
    integers or FP8 although the checkpoint is not `quantized`."""
    if not path.is_file():
        raise _refused(path, "it is not a file")  # opening a pipe would block
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
            if length > min(size - 8, MAX_JSON):
                raise _refused(
                    path, f"its header claims {length:,} bytes of a file of {size:,}; up to {MAX_JSON:,} are allowed"
                )
            text = file.read(length).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise _refused(path, str(error)) from error
    header = parse_object(text, str(path))
    header.pop("__metadata__", None)
    places = [_place(path, name, entry, quantized) for name, entry in header.items()]
    _check_places(path, sorted(places), data_size=size - 8 - length)
    return {
        name: SafetensorsTensor(tuple(entry["shape"]), entry["dtype"], 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def of_module(path: Path, paths: Sequence[Path]) -> str:
    """Return what precedes the names of a file's tensors: the folder of a module of sentence-transformers, or "" in the
    folder of the first of the model's `paths`."""
    return "" if path.parent == paths[0].parent else f"{path.parent.name}."


def _place(path: Path, name: str, entry: Any, quantized: bool) -> tuple[int, int, str]:
    """Return the begin and end of a tensor's data, and its name. Raises `ModelError`."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _refused(path, f"tensor {shown(name)} must have dtype, shape and data_offsets, got {shown(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    sizes = _ITEM_SIZES if quantized else _PLAIN_SIZES
    if not isinstance(dtype, str) or dtype not in sizes:
        raise _refused(path, f"tensor {shown(name)} has the dtype {shown(dtype)}; supported are {', '.join(sizes)}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS or (0 in shape and math.prod(filter(None, shape)) > 2**60):
        raise _refused(path, f"tensor {shown(name)} has the shape {str(shape)[:60]}; at most {_MAX_DIMENSIONS} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _refused(path, f"tensor {shown(name)} has the data_offsets {str(offsets)[:60]}, not [begin, end]")
    begin, end = offsets
    if end - begin != math.prod(shape) * sizes[dtype]:
        raise _refused(
            path,
            f"tensor {shown(name)} has {end - begin:,} bytes of data (data_offsets {offsets}), but its shape {shape} "
            f"in {dtype} takes {math.prod(shape) * sizes[dtype]:,}",
        )
    return begin, end, name


def _check_places(path: Path, places: list[tuple[int, int, str]], data_size: int) -> None:
    ends = [(0, "the header"), *((end, shown(name)) for _, end, name in places)]
    begins = [*((begin, shown(name)) for begin, _, name in places), (data_size, "the end of the file")]
    for (end, one), (begin, other) in zip(ends, begins, strict=True):
        if end != begin:
            what = "overlap" if end > begin else "leave a hole"
            where = f"bytes {min(end, begin):,} and {max(end, begin):,}"
            raise _refused(path, f"by data_offsets, {one} and {other} {what} between {where}")


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _refused(path: Path, what: str) -> ModelError:
    return ModelError(f"{path} cannot be read: {what}. The file is incomplete or damaged; download it again.")


# ------------------------------------------------------------------------------------------------------------ json file


# In bytes. A parsed file takes ten times its size and more. The largest known tokenizer.json has 33 MB, and
# tokenizer_config.json may name every added token; all other files have a few KB.
MAX_JSON = 64 * 2**20
MAX_TOKENIZER_CONFIG = 8 * 2**20
_MAX_SMALL_JSON = 2**20
_MOST_CONTAINERS = 2**20  # objects and arrays; the largest known file has half a million merges


def read_text(path: Path, limit: int) -> str:
    """Return the text of a file of up to `limit` bytes of UTF-8. Raises `ModelError` and FileNotFoundError."""
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise ModelError(f"{path} is not a file.")  # reading a pipe would block
        if size > limit:
            raise ModelError(f"{path} has {size:,} bytes; up to {limit:,} are allowed.")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}. Fetch it anew.") from error


def read_json(path: Path, limit: int = _MAX_SMALL_JSON) -> dict[str, Any]:
    """Return the JSON object in a file, an empty one if there is no such file. Raises `ModelError`."""
    try:
        text = read_text(path, limit)
    except FileNotFoundError:
        return {}
    return parse_object(text, str(path))


def parse_object(text: str, source: str) -> dict[str, Any]:
    """Parse a JSON object. Raises `ModelError`, also for a key that occurs twice."""
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
    """Refuse a key that occurs twice, because JSON readers differ in the value that they use."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:60]!r} occurs twice")
    return found
