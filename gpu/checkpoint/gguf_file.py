"""The GGUF container.

Layout (github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian: magic "GGUF", version u32, tensor count u64,
pair count u64; the pairs (key, type u32, value); the tensor infos (name, dimensions, type u32, offset u64); padding to
`general.alignment`; tensor data. Strings are a u64 length and UTF-8.

1. `gguf.GGUFReader` is not used: it wraps every element of every array in numpy objects, which takes 2.4 s for the
   98,000 strings of SmolLM2's vocabulary (0.05 s here). The `gguf` library is imported for dequantization only.
2. Every length is checked against the rest of the file, and the header against bounds, because a list of numbers takes
   ten times the memory of its bytes: a damaged or hostile file raises `ModelError`.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from gpu.checkpoint.config import ModelError, shown
from gpu.checkpoint.quantized_rows import TENSOR_TYPES, QuantizedRows, TensorType

T = TypeVar("T", str, int, float, bool)

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # 1 had 32-bit counts and was short-lived
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 2**20
_MAX_DIMENSIONS = 4
# Limits of a header. The largest known vocabularies, of 260,000 tokens, need 16 MiB and 1.3 million elements.
_MAX_HEADER = 64 * 2**20  # bytes
_MAX_PAIRS = 2**16
_MAX_TENSORS = 2**16
_MAX_ELEMENTS = 2**22  # elements of all arrays together
_TENSOR_TYPES = {tensor_type.number: tensor_type for tensor_type in TENSOR_TYPES}
_STRING, _ARRAY = 8, 9
SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # for struct


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """The shape, type and place of a tensor."""

    name: str
    shape: tuple[int, ...]  # outermost dimension first, as in torch; the file has the reverse order
    type: TensorType
    offset: int  # from the start of the file, bytes
    nbytes: int
    part: int = 0  # its index in a split file


def file_state(status: os.stat_result) -> tuple[int, ...]:
    """Return numbers that change if the file is replaced or written to."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class GGUFFile:
    """An opened GGUF file, or all parts of a split file. Immutable; files stay mapped as long as this object lives."""

    def __init__(self, path: Path) -> None:
        """Read metadata and tensor infos. Any part of a split file names all of them; the first has the metadata.

        Raises `ModelError` if the file is not GGUF, damaged or unsupported, or a part is missing.
        """
        self.states: list[tuple[int, ...]] = []  # `file_state` of each part
        self._maps: list[mmap.mmap] = []
        header = self._open(path)
        self.paths = split_paths(path, header.metadata.get("split.count", 1))
        self.path = self.paths[0]
        self.metadata: dict[str, Any] = header.metadata
        self.tensors: dict[str, GGUFTensor] = {tensor.name: tensor for tensor in header.tensors}
        if len(self.paths) > 1:
            self._open_parts()

    def _open(self, path: Path) -> _Header:
        try:
            with path.open("rb") as file:
                self.states.append(file_state(os.fstat(file.fileno())))
                self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            why = error if isinstance(error, OSError) else "it is empty"
            raise ModelError(f"{path} cannot be read: {why}.") from error
        return _Header(path, self._maps[-1])

    def _open_parts(self) -> None:
        for opened in (self.states, self._maps, self.tensors):
            opened.clear()  # drop what the named part has added
        headers = [self._open(path) for path in self.paths]
        self.metadata = headers[0].metadata
        for number, (path, header) in enumerate(zip(self.paths, headers, strict=True)):
            for key, value in (("split.no", number), ("split.count", len(headers))):
                if header.metadata.get(key) != value:
                    found = shown(header.metadata.get(key))
                    raise ModelError(f"{path.name}: by its name {key} must be {value}, got {found}. Fetch it anew.")
            for tensor in header.tensors:
                if tensor.name in self.tensors:
                    raise ModelError(f"{path.name}: another part has the tensor {shown(tensor.name)}, too.")
                self.tensors[tensor.name] = replace(tensor, part=number)
        if len(self.tensors) != (count := self.require("split.tensors.count", int)):
            raise ModelError(
                f"{self.path.name}: its parts have {len(self.tensors)} tensors, not {count}. Fetch them anew."
            )

    def get(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """Return the metadata value of `key`, or `default` if absent. Raises `ModelError` if it is not a `kind`."""
        value = self.metadata.get(key)
        if value is None:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ModelError(f"{self.path.name}: metadata {key} must be of type {kind.__name__}, got {shown(value)}.")
        return value

    def require(self, key: str, kind: type[T]) -> T:
        """Return the metadata value of `key`. Raises `ModelError` if it is absent or not a `kind`."""
        value = self.get(key, kind)
        if value is None:
            raise ModelError(f"{self.path.name}: metadata {key} is missing. Convert the model anew.")
        return value

    def require_array(self, key: str, kind: type[T]) -> list[T]:
        """Return the array `key`. Raises `ModelError` if it is absent or its elements are not of type `kind`."""
        values = self.metadata.get(key)
        if not isinstance(values, list) or (values and type(values[0]) is not kind):  # elements are all of one type
            raise ModelError(f"{self.path.name}: metadata {key} must be an array of type {kind.__name__}.")
        return values

    def packed(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of a tensor as the file holds them: [..., bytes of a row], still quantized.

        A view of the mapped file: do not write to it.
        """
        tensor = self.tensors[name]
        data = np.frombuffer(self._maps[tensor.part], np.uint8, tensor.nbytes, tensor.offset)
        return data.reshape(*tensor.shape[:-1], -1)

    def release_pages(self) -> None:
        """Release the file's pages from this process. Later reads come from the page cache or the disk."""
        for mapped in self._maps if hasattr(mmap, "MADV_DONTNEED") else ():
            mapped.madvise(mmap.MADV_DONTNEED)

    def read(self, name: str, rows: slice = slice(None)) -> npt.NDArray[np.float32]:
        """Return a tensor, or some of its rows, dequantized to float32, in new memory."""
        tensor, packed = self.tensors[name], self.packed(name)[rows]
        if tensor.type.name == "F32":
            return packed.view(np.float32).copy()
        return QuantizedRows(tensor.type.name, (len(packed), *tensor.shape[1:]), packed).dequantize()


def split_paths(path: Path, count: Any) -> tuple[Path, ...]:
    """Return the paths of all `count` parts of a split file, of which this is one. Raises `ModelError`."""
    if count == 1:
        return (path,)
    named = SPLIT_NAME.fullmatch(path.name)
    if named is None or int(named["count"]) != count:
        raise ModelError(
            f"{path.name} is one of {shown(count)} parts, and the others cannot be found by this name. Give the parts "
            f"the names under which they were published, which end in -00001-of-{count!s:0>5}.gguf."
        )
    begin, end = named.span("number")
    paths = tuple(path.with_name(f"{path.name[:begin]}{number:05}{path.name[end:]}") for number in range(1, count + 1))
    if missing := [each.name for each in paths if not each.is_file()]:
        raise ModelError(f"{path.parent} lacks {missing[0]}, one of the {count} parts of the model. Fetch it.")
    return paths


class _Header:
    """Parses metadata and tensor infos, front to back."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self._path = path
        self._buffer = buffer
        self._size = len(buffer)
        self._end = min(self._size, _MAX_HEADER)
        self._position = 0
        self._elements = 0

        if buffer[: len(_MAGIC)] != _MAGIC:
            self._fail(f"it begins with {bytes(buffer[:4])!r} where a GGUF file begins with {_MAGIC!r}")
        self._position = len(_MAGIC)
        version = self._scalar("I")
        if version not in _VERSIONS:
            self._fail(f"GGUF version {version} (as little-endian) is not supported; supported are 2 and 3")
        tensor_count, pair_count = self._scalar("Q"), self._scalar("Q")
        for what, count, most in (("tensors", tensor_count, _MAX_TENSORS), ("metadata pairs", pair_count, _MAX_PAIRS)):
            if count > most:
                self._fail(f"it claims {count:,} {what}; up to {most:,} are allowed")

        self.metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._string()
            if key in self.metadata:
                self._fail(f"metadata {shown(key)} occurs twice")
            self.metadata[key] = self._value(key)

        infos = [self._tensor_info() for _ in range(tensor_count)]
        self.tensors = self._placed(infos)

    def _placed(self, infos: list[tuple[str, tuple[int, ...], int, int]]) -> list[GGUFTensor]:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT or alignment % 8 != 0:
            self._fail(f"general.alignment must be a multiple of 8 up to {_MAX_ALIGNMENT:,}, got {shown(alignment)}")
        start = -(-self._position // alignment) * alignment

        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_id, offset in infos:
            if name in tensors:
                self._fail(f"tensor {shown(name)} occurs twice")
            tensor_type = self._tensor_type(name, type_id)
            block_elements, block_bytes = tensor_type.block, tensor_type.block_bytes
            if shape[-1] % block_elements != 0:
                self._fail(
                    f"tensor {shown(name)} has rows of {shape[-1]} elements, which is no multiple of the "
                    f"{block_elements} of a {tensor_type.name} block"
                )
            nbytes = math.prod(shape) // block_elements * block_bytes
            if offset % alignment != 0 or start + offset + nbytes > self._size:
                self._fail(
                    f"tensor {shown(name)} would end at byte {start + offset + nbytes:,} of a file of "
                    f"{self._size:,} bytes, or begins at no multiple of {alignment}, so the file is incomplete or "
                    "damaged; download it again"
                )
            tensors[name] = GGUFTensor(name, shape, tensor_type, start + offset, nbytes)
        self._check_overlaps(list(tensors.values()))
        return list(tensors.values())

    def _check_overlaps(self, tensors: list[GGUFTensor]) -> None:
        """Refuse overlapping tensors: many tensors over the same bytes would make a large model of a small file."""
        in_order = sorted(tensors, key=lambda tensor: tensor.offset)
        for one, other in itertools.pairwise(in_order):
            if one.offset + one.nbytes > other.offset:
                self._fail(f"the tensors {shown(one.name)} and {shown(other.name)} overlap at byte {other.offset:,}")

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._scalar("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            self._fail(f"tensor {shown(name)} has {dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are possible")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))[::-1]
        if 0 in shape:
            self._fail(f"tensor {shown(name)} has the shape {list(shape)}")
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _tensor_type(self, name: str, number: int) -> TensorType:
        if number not in _TENSOR_TYPES:
            supported = ", ".join(tensor_type.name for tensor_type in TENSOR_TYPES)
            self._fail(
                f"tensor {shown(name)} has the type {_type_name(number)}; supported are {supported}. "
                f"Fetch the model in another quantization, such as Q8_0 or Q4_K_M"
            )
        return _TENSOR_TYPES[number]

    def _value(self, key: str) -> Any:
        kind = self._value_type(key)
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        kind, count = self._value_type(key), self._scalar("Q")
        if kind == _ARRAY:
            self._fail(f"metadata {shown(key)} is an array of arrays, which is not supported")
        self._elements += count
        if self._elements > _MAX_ELEMENTS:
            named = "strings" if kind == _STRING else "numbers"
            self._fail(
                f"metadata {shown(key)} claims {count:,} {named}; all arrays together may have {_MAX_ELEMENTS:,}"
            )
        if kind == _STRING:
            return self._strings(count)
        code = _SCALARS[kind]
        start = self._advance(count * struct.calcsize(f"<{code}"))
        return np.frombuffer(self._buffer, np.dtype(code).newbyteorder("<"), count, start).tolist()

    def _value_type(self, key: str) -> int:
        number: int = self._scalar("I")
        if number not in (*_SCALARS, _STRING, _ARRAY):
            self._fail(f"metadata {shown(key)} has the unknown type {number}")
        return number

    def _scalar(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        return struct.unpack_from(f"<{code}", self._buffer, self._advance(size))[0]

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        # The only hot loop: a vocabulary and its merges are some 100,000 to 400,000 strings.
        buffer, position, end = self._buffer, self._position, self._end
        if count * 8 > end - position:
            self._cut_short(f"ends before the {count:,} strings at byte {position:,}")
        length_at = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            start = position + 8
            if start > end or (position := start + length_at(buffer, start - 8)[0]) > end:
                self._cut_short(f"has a string at byte {start - 8:,} that runs past its end")
            try:
                strings.append(buffer[start:position].decode())
            except UnicodeDecodeError:
                self._fail(f"the string at byte {start:,} is not UTF-8")
        self._position = position
        return strings

    def _advance(self, size: int) -> int:
        """Advance by `size` bytes and return the position before."""
        start = self._position
        if start + size > self._end:
            self._cut_short("ends inside its header")
        self._position = start + size
        return start

    def _cut_short(self, what: str) -> NoReturn:
        if self._end < self._size:
            self._fail(f"its header is longer than the {_MAX_HEADER:,} bytes that are allowed")
        self._fail(f"it has {self._size:,} bytes and {what}, so it is incomplete or damaged; download it again")

    def _fail(self, what: str) -> NoReturn:
        raise ModelError(f"{self._path} is not a GGUF file that can be read: {what}.")


def _type_name(number: int) -> str:
    from gguf.constants import GGMLQuantizationType

    return next((known.name for known in GGMLQuantizationType if known == number), f"number {number}")
