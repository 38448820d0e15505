"""The quantized linear layers of safetensors checkpoints: FP8, compressed-tensors, GPTQ, AWQ, bitsandbytes, modelopt.

`quantization_config` of config.json says how they are stored (`quantized_checkpoint`). A layer has several tensors: its
numbers, their scales and perhaps zero points. `linear_layers` puts them together while a file is read. A number is
scale (q - zero); activations are not quantized.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.checkpoint.config import ModelError, shown
from gpu.checkpoint.hf_files import parse_object
from gpu.checkpoint.quantized_rows import E4M3, MXFP4_DOUBLED, PackedRows, QuantizedRows, from_bfloat16, scaled_rows

Array = NDArray[Any]


@dataclass(frozen=True)
class Storage:
    """The way in which some layers are stored."""

    kind: str  # of `_KINDS`
    bits: int = 8
    group: int = 0  # inputs that share a scale; 0: all of a row
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale
    symmetric: bool = True  # no zero points
    first_zero: int = 0  # is added to the zero points that are stored


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """The storage of each layer, and the layers that are not quantized."""

    storages: tuple[tuple[tuple[str, ...], Storage], ...]  # with the targets that have it: names, or patterns ("re:")
    ignored: tuple[str, ...] = ()

    def storage_of(self, layer: str) -> Storage | None:
        """Return the storage of a layer by its name, None if it is not quantized."""
        if any(_matches(each, layer) for each in self.ignored):
            return None
        return next((each for targets, each in self.storages if any(_matches(name, layer) for name in targets)), None)


def _matches(target: str, layer: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], layer) is not None
    return target in ("Linear", layer)


def quantized_checkpoint(config: Mapping[str, Any], source: str) -> QuantizedCheckpoint:
    """Read `quantization_config`. Raises `ModelError` for what is not supported."""
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise ModelError(
            f"{source}: a quantized checkpoint (quant_method={shown(method)}) is not supported; supported are "
            f"{', '.join(_METHODS)}. Take the model's unquantized files or a GGUF file."
        )
    return _METHODS[method](_Config(config, source))


def quantized_layers_of(values: Mapping[str, Any], source: str) -> QuantizedCheckpoint | None:
    """Return how a parsed config.json says that layers are stored; None if only MXFP4 stacks may be quantized."""
    text = values.get("text_config")
    config = values.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    if not isinstance(config, dict) or config.get("quant_method") == "mxfp4":
        return None
    return quantized_checkpoint(config, source)


class _Config:
    """`quantization_config`, or an object in it."""

    def __init__(self, values: Any, source: str, prefix: str = "quantization_config") -> None:
        self.source, self._prefix = source, prefix
        if not isinstance(values, dict):
            raise ModelError(f"{source}: {prefix} in config.json must be an object, got {shown(values)}.")
        self.values: dict[str, Any] = values

    def one_of(self, key: str, *allowed: Any) -> Any:
        """Return the value of `key`, which must be one of `allowed`; the first of them if the key is missing."""
        value = self.values.get(key, allowed[0])
        if not any(type(value) is type(each) and value == each for each in allowed):
            named = ", ".join(map(str, allowed))
            raise ModelError(
                f"{self.source}: {self._prefix}.{key}={shown(value)} in config.json is not supported; supported are "
                f"{named}. Take the model's unquantized files or a GGUF file."
            )
        return value

    def size(self, key: str) -> int:
        """Return a number of inputs, 0 for all (missing, null or -1)."""
        value = self.values.get(key)
        if value in (None, -1):
            return 0
        if type(value) is not int or not 0 < value < 2**20:
            raise ModelError(
                f"{self.source}: {self._prefix}.{key} must be a positive number or -1, got {shown(value)}."
            )
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """Return a list of names and patterns. A pattern that could take exponential time is refused."""
        value = self.values.get(key) or []
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ModelError(f"{self.source}: {self._prefix}.{key} must be a list of names, got {shown(value)}.")
        for pattern in (each[3:] for each in value if each.startswith("re:")):
            try:
                re.compile(pattern)
                is_plain = len(pattern) < 1000 and not re.search(r"\)[*+?{]", pattern)
            except re.error:
                is_plain = False
            if not is_plain:
                raise ModelError(
                    f"{self.source}: {self._prefix}.{key} has the pattern {shown(pattern)}, not supported."
                )
        return tuple(value)

    def block(self, key: str) -> tuple[int, int] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and 0 < n < 2**20 for n in value):
            raise ModelError(f"{self.source}: {self._prefix}.{key} must be two numbers, got {shown(value)}.")
        return value[0], value[1]

    def parts_of_names(self, *keys: str) -> tuple[str, ...]:
        """Return patterns of the layers that have one of these parts in their names; `*` in a part is any text."""
        names = (re.escape(name).replace(r"\*", ".*") for key in keys for name in self.names(key))
        return tuple(rf"re:(.*\.)?{name}(\..*|$)" for name in names)


def _fp8(config: _Config) -> QuantizedCheckpoint:
    config.one_of("fmt", "e4m3")
    config.one_of("activation_scheme", "dynamic", "static")
    config.one_of("kv_cache_scheme", None)
    storage = Storage("fp8", block=config.block("weight_block_size"))
    ignored = config.parts_of_names("modules_to_not_convert", "ignored_layers")
    return QuantizedCheckpoint(((("Linear",), storage),), ignored)


def _gptq(config: _Config) -> QuantizedCheckpoint:
    bits = config.one_of("bits", 4, 2, 3, 8)
    config.one_of("dynamic", None, {})
    version = config.one_of("checkpoint_format", "gptq", "gptq_v2")
    config.one_of("desc_act", False, True)
    first_zero = 1 if version == "gptq" else 0
    storage = Storage("gptq", bits, config.size("group_size"), symmetric=False, first_zero=first_zero)
    return QuantizedCheckpoint(((("Linear",), storage),))


def _awq(config: _Config) -> QuantizedCheckpoint:
    config.one_of("bits", 4)
    config.one_of("version", "gemm", "GEMM")
    config.one_of("zero_point", True)
    storage = Storage("awq", 4, config.size("group_size"), symmetric=False)
    return QuantizedCheckpoint(((("Linear",), storage),), config.parts_of_names("modules_to_not_convert"))


def _modelopt(config: _Config) -> QuantizedCheckpoint:
    """NVIDIA's. Its scales for keys and values are not used: they are kept in the type of `kv_cache_dtype`."""
    is_fp8 = config.one_of("quant_algo", "FP8", "NVFP4") == "FP8"
    config.one_of("group_size", None, 16)
    storage = Storage("fp8") if is_fp8 else Storage("modelopt4", 4, 16)
    return QuantizedCheckpoint(((("Linear",), storage),), config.parts_of_names("ignore", "exclude_modules"))


_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized")


def _compressed_tensors(config: _Config) -> QuantizedCheckpoint:
    config.one_of("quantization_status", "compressed")
    for key in ("kv_cache_scheme", "transform_config"):
        config.one_of(key, None, {})
    if config.values.get("sparsity_config"):
        _Config(config.values["sparsity_config"], config.source, "sparsity_config").one_of("format", "dense")
    groups = _Config(config.values.get("config_groups"), config.source, "config_groups").values
    return QuantizedCheckpoint(
        tuple(
            _of_group(config, _Config(group, config.source, f"config_groups.{name}")) for name, group in groups.items()
        ),
        config.names("ignore"),
    )


def _of_group(config: _Config, group: _Config) -> tuple[tuple[str, ...], Storage]:
    kind = (group if group.values.get("format") else config).one_of("format", *_FORMATS)
    group.one_of("output_activations", None)
    weights = _Config(group.values.get("weights"), config.source, "weights")
    number = weights.one_of("type", "int", "float")
    is_packed = kind == "pack-quantized"
    bits = weights.one_of("num_bits", *((4, 8, 2) if is_packed else (4,) if kind.startswith("nvfp4") else (8,)))
    in_bytes = "fp8" if number == "float" else "int8"
    kind = {"pack-quantized": "packed", "nvfp4-pack-quantized": "nvfp4"}.get(kind, in_bytes)
    strategy = weights.one_of("strategy", "tensor", "channel", "group", "tensor_group", "block")
    return group.names("targets"), Storage(
        kind,
        bits,
        weights.size("group_size") if strategy in ("group", "tensor_group") else 0,
        weights.block("block_structure") if strategy == "block" else None,
        symmetric=weights.one_of("symmetric", True, False),
    )


def _bitsandbytes(config: _Config) -> QuantizedCheckpoint:
    config.one_of("load_in_8bit", False)
    config.one_of("bnb_4bit_quant_storage", "uint8")
    return QuantizedCheckpoint(((("Linear",), Storage("bnb", 4)),))  # layers that are skipped have no scales


_METHODS: dict[str, Callable[[_Config], QuantizedCheckpoint]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "modelopt": _modelopt,
}


# --------------------------------------------------------------------------------------------------------------- layers


# The tensors of a layer: numbers, scales, and optional ones. Any other tensor, except a bias, is unknown.
_KINDS = {
    "fp8": ("weight", ("weight_scale", "weight_scale_inv"), ("input_scale", "k_scale", "v_scale")),
    "modelopt4": ("weight", ("weight_scale",), ("weight_scale_2", "input_scale", "k_scale", "v_scale")),
    "int8": ("weight", ("weight_scale",), ("weight_zero_point", "input_scale")),
    "packed": ("weight_packed", ("weight_scale",), ("weight_zero_point", "weight_g_idx", "weight_shape")),
    "nvfp4": ("weight_packed", ("weight_scale",), ("weight_global_scale", "input_global_scale")),
    "gptq": ("qweight", ("scales",), ("qzeros", "g_idx")),
    "awq": ("qweight", ("scales",), ("qzeros",)),
    "bnb": ("weight", ("weight.absmax",), ("weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")),
}
BNB_STATE = ".quant_state.bitsandbytes__"  # a JSON object, after the name of the weight and before the type
_KINDS["bnb"] = (*_KINDS["bnb"][:2], (*_KINDS["bnb"][2], f"weight{BNB_STATE}nf4", f"weight{BNB_STATE}fp4"))
_MAX_STATE = 2**16  # bytes; it has some 200
_GLOBAL_SCALES = {"nvfp4": "weight_global_scale", "modelopt4": "weight_scale_2"}  # of all scales of 8 bits
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # the place of each of eight outputs in a word


def linear_layers(
    found: Iterable[tuple[str, Array]], checkpoint: QuantizedCheckpoint, names: Collection[str], source: str
) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a checkpoint, which has `names`. The tensors of each quantized layer become one weight.

    Tensors of layers that are not quantized, or lack their numbers or scales, keep their names.
    """
    waiting: dict[str, dict[str, Array]] = {}
    for name, array in found:
        layer, _, kind = name.rpartition(".")
        if ".weight." in name:  # of bitsandbytes
            layer, kind = name.split(".weight.", 1)[0], "weight." + name.split(".weight.", 1)[1]
        storage = checkpoint.storage_of(layer)
        members: set[str] = set()
        if storage is not None:
            numbers, scales, others = _KINDS[storage.kind]
            members = {each for each in (numbers, *scales, *others) if f"{layer}.{each}" in names}
            if numbers not in members or members.isdisjoint(scales):
                members = set()
        if storage is None or kind not in members:
            yield name, array
            continue
        tensors = waiting.setdefault(layer, {})
        tensors[kind] = array
        if len(tensors) == len(members):
            yield f"{layer}.weight", QuantizedLayer(f"{source}: {layer}", storage, waiting.pop(layer))


@dataclass(frozen=True)
class QuantizedLayer:
    """The tensors of a layer: views of the mapped file. A matrix [outputs, inputs], or some of its rows."""

    name: str
    storage: Storage
    tensors: Mapping[str, Array]  # by the last part of their names
    rows: slice = field(default_factory=lambda: slice(None))
    ndim = 2

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> QuantizedLayer:
        return replace(self, rows=rows)

    @property
    def shape(self) -> tuple[int, int]:
        """Raises `ModelError` if the shapes of the tensors do not fit each other."""
        rows, cols = self._whole_shape()
        self._check_shapes(rows, cols)
        return len(range(rows)[self.rows]), cols

    def read(self) -> QuantizedRows | NDArray[np.float32]:
        """Return the numbers, exactly: as blocks, or as float32 where no block holds them."""
        storage, tensors = self.storage, self.tensors
        rows, cols = self._whole_shape()
        if storage.kind == "bnb":
            return self._code_book(rows, cols)[self.rows]
        if storage.kind == "fp8":
            return scaled_rows(E4M3[self._of(np.uint8, "weight")], self._scales(rows), self._per_scale)[self.rows]
        if storage.kind in _GLOBAL_SCALES:
            packed = self._of(np.uint8, _KINDS[storage.kind][0])
            nibbles = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], -1)
            scales = from_bfloat16(E4M3[self._of(np.uint8, "weight_scale")])
            overall = _floats(tensors[_GLOBAL_SCALES[storage.kind]]).ravel()
            scales = (scales / overall if storage.kind == "nvfp4" else scales * overall) * np.float32(0.5)
            return scaled_rows(MXFP4_DOUBLED[nibbles].reshape(rows, cols), scales, 16)[self.rows]
        numbers, zeros, scales, groups = self._integers()
        if groups is not None:
            zeros = zeros[:, groups] if zeros.shape[1] > 1 else zeros
            values: NDArray[np.float32] = (numbers.astype(np.int16) - zeros) * scales[:, groups]
            return values[self.rows]
        index = np.arange(cols) // self._per_scale
        differences = numbers.astype(np.int16) - (zeros[:, index] if zeros.shape[1] > 1 else zeros)
        if differences.min() < -128 or differences.max() > 127:
            return np.asarray((differences * scales[:, index])[self.rows], dtype=np.float32)
        return scaled_rows(differences.astype(np.int8), scales, self._per_scale)[self.rows]

    def packed(self) -> PackedRows | None:
        """Return the numbers as they are stored, for a device that computes with them; None for NVFP4 and tables."""
        if self.storage.kind in (*_GLOBAL_SCALES, "bnb"):
            return None
        rows, cols = self._whole_shape()
        bits, zeros, groups = 0, np.zeros((1, 1), np.uint8), None
        if self.storage.kind == "fp8":
            numbers, scales = self._of(np.uint8, "weight"), self._scales(rows)
        else:
            numbers, zeros, scales, groups = self._integers()
            bits = 8 if self.storage.bits == 8 else 4
            if numbers.dtype == np.int8:
                numbers, zeros = (each.view(np.uint8) ^ np.uint8(128) for each in (numbers, zeros))
        groups = np.arange(cols) // self._per_scale if groups is None else groups
        return PackedRows(bits, numbers, scales, np.broadcast_to(zeros, scales.shape), groups)[self.rows]

    @property
    def _per_scale(self) -> int:
        """The inputs that share a scale."""
        return self.storage.block[1] if self.storage.block else self.storage.group or self._whole_shape()[1]

    def _integers(self) -> tuple[Array, Array, NDArray[np.float32], Array | None]:
        """Return q [rows, inputs], zero points and scales [rows or 1, groups or 1], and the group of each input if
        groups are not in order."""
        bits, kind = self.storage.bits, self.storage.kind
        rows, cols = self._whole_shape()
        if kind in ("gptq", "awq"):
            scales, name = _floats(self.tensors["scales"]).T, "g_idx"
            zeros = unpacked(self._of(np.int32, "qzeros"), bits)
            if kind == "awq":
                numbers = _in_order(unpacked(self._of(np.int32, "qweight"), 4)).T
                zeros = _in_order(zeros).T
            else:
                numbers = unpacked(np.ascontiguousarray(self._of(np.int32, "qweight").T), bits)
                zeros = (zeros + np.uint8(self.storage.first_zero) & np.uint8(2**bits - 1)).T
        else:
            scales, name = self._scales(rows), "weight_g_idx"
            given = self.tensors.get("weight_zero_point")
            if kind == "int8":
                zeros = np.zeros((1, 1), np.int8) if given is None else given.reshape(scales.shape)
                return self._of(np.int8, "weight"), zeros, scales, None
            numbers = unpacked(self._of(np.int32, "weight_packed"), bits)
            zeros = np.full((1, 1), 2 ** (bits - 1), np.uint8)
            if given is not None:
                words = np.ascontiguousarray(self._of(np.int32, "weight_zero_point").T)
                zeros = unpacked(words, bits).T[:rows]
        if name not in self.tensors:
            return numbers, zeros, scales, None
        groups = self._of(np.int32, name)
        if np.any((groups < 0) | (groups >= scales.shape[1])):
            raise ModelError(f"{self.name}.{name} names a group that is not one of {scales.shape[1]}.")
        return numbers, zeros, scales, None if np.array_equal(groups, np.arange(cols) // self._per_scale) else groups

    def _code_book(self, rows: int, cols: int) -> NDArray[np.float32]:
        """Return the numbers of bitsandbytes: entries of a table, the first in the higher bits, times a scale for each
        block of the flattened matrix. With double quantization the scales are bytes: entries of a second table times
        scales of their own, plus an offset."""
        tensors, state = self.tensors, self._state()
        if "weight.nested_absmax" not in tensors:
            scales = self._of(np.float32, "weight.absmax").ravel()
        else:
            steps = np.repeat(_floats(tensors["weight.nested_absmax"]).ravel(), state["nested_blocksize"])
            entries = _floats(tensors["weight.nested_quant_map"])[self._of(np.uint8, "weight.absmax").ravel()]
            scales = entries * steps[: entries.size] + np.float32(state["nested_offset"])
        packed = self._of(np.uint8, "weight").ravel()
        numbers = _floats(tensors["weight.quant_map"])[np.stack([packed >> np.uint8(4), packed & np.uint8(15)], -1)]
        each = np.repeat(scales, state["blocksize"])[: rows * cols]
        return (numbers.ravel()[: rows * cols] * each).reshape(rows, cols)

    def _state(self) -> dict[str, Any]:
        """Return the sizes that bitsandbytes keeps with a weight. Raises `ModelError` if they are not allowed."""
        nested = "weight.nested_absmax" in self.tensors
        needed = {"weight.quant_map"} | ({"weight.nested_quant_map"} if nested else set())
        name = next((name for name in self.tensors if BNB_STATE in name), None)
        if name is None or not needed <= self.tensors.keys():
            raise ModelError(f"{self.name} lacks its quant_state or a quant_map. Fetch the model's files anew.")
        text = self._of(np.uint8, name).tobytes()[:_MAX_STATE].decode("utf-8", "replace")
        state = parse_object(text, f"{self.name}.{name}")
        shape: Any = state.get("shape")
        shape = shape if isinstance(shape, list) else []
        sizes = [*shape, *(state.get(key) for key in ("blocksize", "nested_blocksize")[: 1 + nested])]
        is_offset = not nested or isinstance(state.get("nested_offset"), float)
        if len(shape) != 2 or not is_offset or not all(type(each) is int and 0 < each < 2**24 for each in sizes):
            raise ModelError(f"{self.name}.{name} must name a matrix's shape and its blocksize, got {shown(text)}.")
        return state

    def _whole_shape(self) -> tuple[int, int]:
        """Return outputs and inputs of the layer."""
        storage = self.storage
        if storage.kind == "bnb":
            rows, cols = self._state()["shape"]
            return rows, cols
        numbers = self.tensors[_KINDS[storage.kind][0]].shape
        if len(numbers) != 2:
            raise ModelError(f"{self.name} has numbers of the shape {list(numbers)}, which is no matrix.")
        if storage.kind == "gptq":
            return numbers[1], numbers[0] * 32 // storage.bits
        per_number = {"packed": 32 // storage.bits, "nvfp4": 2, "modelopt4": 2, "awq": 8}.get(storage.kind, 1)
        rows, cols = numbers[0], numbers[1] * per_number
        return (cols, rows) if storage.kind == "awq" else (rows, cols)

    def _check_shapes(self, rows: int, cols: int) -> None:
        storage, bits = self.storage, self.storage.bits
        per_row = -(-cols // storage.group) if storage.group else 1
        allowed: dict[str, tuple[tuple[int, ...], ...]]
        if storage.kind == "bnb":
            state, half = self._state(), -(-rows * cols // 2)
            count = -(-rows * cols // state["blocksize"])
            allowed = {"weight": ((half, 1), (1, half)), "weight.absmax": ((count,),), "weight.quant_map": ((16,),)}
            outer = (-(-count // state.get("nested_blocksize", 1)),)
            allowed |= {"weight.nested_absmax": (outer,), "weight.nested_quant_map": ((256,),)}
        elif storage.kind in ("gptq", "awq"):
            allowed = {"scales": ((per_row, rows),), "qzeros": ((per_row, rows * bits // 32),), "g_idx": ((cols,),)}
        else:
            scales: tuple[tuple[int, ...], ...] = ((rows, per_row),)
            if storage.block:
                scales = ((-(-rows // storage.block[0]), -(-cols // storage.block[1])),)
            elif not storage.group:
                scales = ((), (1,), (1, 1), (rows,), (rows, 1))
            zeros = scales if storage.kind == "int8" else ((-(-rows * bits // 32), per_row),)
            allowed = {"weight_scale": scales, "weight_scale_inv": scales, "weight_zero_point": zeros}
            allowed |= {"weight_g_idx": ((cols,),), **dict.fromkeys(_GLOBAL_SCALES.values(), ((), (1,)))}
        for name, shapes in allowed.items():
            if name in self.tensors and self.tensors[name].shape not in shapes:
                raise ModelError(
                    f"{self.name}.{name} has the shape {list(self.tensors[name].shape)}; for {rows} outputs and {cols} "
                    f"inputs it must be {' or '.join(str(list(shape)) for shape in shapes)}."
                )
        needed = {"gptq": "qzeros", "awq": "qzeros", **_GLOBAL_SCALES}.get(storage.kind)
        if storage.kind == "packed" and not storage.symmetric:
            needed = "weight_zero_point"
        if needed is not None and needed not in self.tensors:
            raise ModelError(f"{self.name} has no {needed}. Fetch the model's files anew.")

    def _scales(self, rows: int) -> NDArray[np.float32]:
        given = self.tensors["weight_scale" if "weight_scale" in self.tensors else "weight_scale_inv"]
        scales = _floats(given)
        if self.storage.block:
            return np.repeat(scales, self.storage.block[0], axis=0)[:rows]
        return np.broadcast_to(scales.reshape(-1, 1), (rows, 1)) if not self.storage.group else scales

    def _of(self, dtype: type[Any], name: str) -> Array:
        array = self.tensors[name]
        if array.dtype != dtype:
            raise ModelError(f"{self.name}.{name} is of type {array.dtype}; it must be {dtype.__name__}.")
        return array


def _floats(array: Array) -> NDArray[np.float32]:
    return from_bfloat16(array) if array.dtype == np.uint16 else array.astype(np.float32)


def unpacked(words: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """[rows, words of 32 bits] -> [rows, numbers]: each row is a string of bits, lowest first."""
    in_bytes = np.ascontiguousarray(words).view(np.uint8)
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        return (in_bytes[..., None] >> shifts & np.uint8(2**bits - 1)).reshape(len(words), -1)
    each = np.unpackbits(in_bytes, axis=1, bitorder="little").reshape(len(words), -1, bits)
    return np.bitwise_or.reduce(each << np.arange(bits, dtype=np.uint8), axis=2)


def _in_order(numbers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return AWQ's numbers [rows, outputs] in the order of the outputs."""
    return numbers.reshape(len(numbers), -1, 8)[..., _AWQ_PLACES].reshape(len(numbers), -1)
