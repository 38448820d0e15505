"""The tensors of a model, their slices for a rank, and stacked experts.

Imported by every reader of this package.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpu.checkpoint.architecture import DecoderSpec, HeadOrder, Part, Ranges, parts_of
from gpu.checkpoint.config import ModelConfig, ModelError, shown
from gpu.checkpoint.families.table import spec_of
from gpu.checkpoint.quantized_rows import (
    MXFP4_DOUBLED,
    OWN_TYPES,
    TENSOR_TYPES,
    PackedRows,
    QuantizedRows,
    q8_0_of_powers,
)

logger = logging.getLogger(__name__)

# Computed from the configuration, whatever a checkpoint says; old Llama checkpoints saved them.
_DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|embeddings\.(position|token_type)_ids")
# What training put on an encoder: it predicts masked words, or pools in a way that the served model does not.
_OF_TRAINING = re.compile(r"(cls|lm_head|pooler|head|decoder|vocab_\w+)\..+")
_OF_ENCODER = re.compile(r"(bert|roberta|distilbert|nomic_bert)\.|model\.(?=embeddings\.|final_norm\.)")
_OLD_NORM = re.compile(r"(?<=LayerNorm\.)(gamma|beta)$")  # of checkpoints that were converted from TensorFlow
# Tensors of a vision model, which are skipped, and the prefix of its text part, which is served.
_OF_IMAGES = re.compile(r"(model\.)?(vision_tower|visual|multi_modal_projector|embed_vision)\..+")
_OF_AUDIO = re.compile(r"(model\.)?(audio_tower|embed_audio)\..+")
_OF_DRAFTS = re.compile(r"(model\.)?mtp\..+")  # layers that predict several tokens, which are skipped, too
_SKIPPED = {"the vision model": _OF_IMAGES, "the audio model": _OF_AUDIO, "multi-token prediction": _OF_DRAFTS}
# Those of a layer that reads the keys and values of another (`ModelConfig.source`).
_OF_KEYS = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\..+")
_OF_TEXT = re.compile(r"(model\.language_model|language_model\.model)\.|language_model\.(?=lm_head\.)")
_BARE = re.compile(r"(embed_tokens|layers|norm)\.")  # names in a model that was saved without its head
# A layer after the model's own that predicts further tokens has this tensor, and all its tensors are skipped.
_LAYER, _OF_NEXT = re.compile(r"model\.layers\.(\d{1,5})\..+"), "model.layers.{}.eh_proj.weight"
_NAMES_SHOWN = 8  # names of each kind in an error: one missing layer alone has a dozen


class Shaped(Protocol):
    """Any object with a tensor's shape."""

    @property
    def shape(self) -> Sequence[int]: ...


W = TypeVar("W", bound=Shaped)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every weight of a model; linear weights are [out_features, in_features]."""
    return shapes_of(spec_of(config))


def shapes_of(spec: object) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every weight in `spec`, a model or one rank's part."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts_of(spec):
        shapes[part.weight_name] = part.shape
        if part.bias:
            shapes[f"{part.name}.bias"] = part.shape[:1]
    return shapes


def text_name(name: str) -> str:
    """Return the name that a tensor has in a model without a vision part."""
    if _BARE.match(name):
        return f"model.{name}"
    if _OF_ENCODER.match(name):
        name = _OF_ENCODER.sub("", name, count=1)
        return _OLD_NORM.sub(lambda found: "weight" if found[1] == "gamma" else "bias", name)
    return _OF_TEXT.sub(lambda found: "model." if found[1] else "", name, count=1) if _OF_TEXT.match(name) else name


def checked(
    weights: Iterable[tuple[str, W]], config: ModelConfig, *, source: str, spec: DecoderSpec | None = None
) -> Iterator[tuple[str, W]]:
    """Yield the weights of `config`, or of a rank's `spec`, each once and in its shape. At the end, raises `ModelError`
    that lists missing, unknown, repeated and misshapen weights."""
    check = _Check(config, spec)
    for given, weight in weights:
        name = text_name(given)
        if check.takes(name, tuple(weight.shape)):
            yield name, weight
    check.end(source)


def check_shapes(found: Iterable[tuple[str, tuple[int, ...]]], config: ModelConfig, *, source: str) -> None:
    """Raise `ModelError` unless the tensors of a file are those of `config`, before memory is allocated for any."""
    check = _Check(config)
    for name, shape in found:
        check.takes(text_name(name), shape)
    check.end(source)
    if check.skipped:
        kinds = " and ".join(f"{count} tensors of {kind}" for kind, count in check.skipped.items())
        logger.info("%s: %s are skipped", source, kinds)


class _Check:
    """Collects a model's missing and unknown tensors. Unknown tensors are an error, too: ignoring a bias would silently
    change every token."""

    def __init__(self, config: ModelConfig, spec: DecoderSpec | None = None) -> None:
        self._config = config
        self._shapes = shapes_of(spec or spec_of(config))
        self._missing = dict(self._shapes)
        self.skipped: Counter[str] = Counter()
        self._beyond: dict[int, list[str]] = defaultdict(list)  # tensors of layers after the model's own
        self._faults: dict[str, list[str]] = {"missing": [], "unknown": [], "given twice": [], "misshapen": []}

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        for kind, pattern in _SKIPPED.items():
            if pattern.fullmatch(name):
                self.skipped[kind] += 1
                return False
        if self._config.encoder is not None and name not in self._shapes and _OF_TRAINING.fullmatch(name):
            self.skipped["heads that only training used"] += 1
            return False
        if (keys := _OF_KEYS.fullmatch(name)) and name not in self._shapes and self._reads_others(int(keys[1])):
            self.skipped["layers that read the keys of others"] += 1
            return False
        if _DERIVED.fullmatch(name) or (name == "lm_head.weight" and self._config.tie_word_embeddings):
            return False
        if (found := _LAYER.fullmatch(name)) and int(found[1]) >= self._config.num_hidden_layers:
            self._beyond[int(found[1])].append(name)
            return False
        expected = self._missing.pop(name, None)
        if expected == shape:
            return True
        if name not in self._shapes:
            self._faults["unknown"].append(shown(name))
        elif expected is None:
            self._faults["given twice"].append(name)
        else:
            self._faults["misshapen"].append(f"{name} is {list(shape)}, needs {list(expected)}")
        return False

    def _reads_others(self, layer: int) -> bool:
        return layer < self._config.num_hidden_layers and self._config.source(layer) != layer

    def end(self, source: str) -> None:
        for layer, names in self._beyond.items():
            if _OF_NEXT.format(layer) in names:
                self.skipped["multi-token prediction"] += len(names)
            else:
                self._faults["unknown"] += map(shown, names)
        self._faults["missing"] += self._missing
        faults = [
            f"{len(names)} {kind}: {', '.join(names[:_NAMES_SHOWN])}"
            + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "")
            for kind, names in self._faults.items()
            if names
        ]
        if faults:
            config = self._config
            kind = f"a {config.architecture} of {config.num_hidden_layers} layers"
            raise ModelError(
                f"{source} does not hold the {len(self._shapes)} tensors of {kind} (attention_bias="
                f"{config.attention_bias}, qk_norm={config.qk_norm}) that its configuration claims: "
                f"{'; '.join(faults)}. Fetch the model's files anew."
            )


# --------------------------------------------------------------------------------------------------------------- stacks
# Tensors of a Hugging Face checkpoint that hold the parts of many experts are split while they are read.
#
# MXFP4 (Open Compute Project, "Microscaling Formats"): blocks of 32 numbers of 4 bits, 1 for the sign, 2 for the
# exponent and 1 for the mantissa, with a power of two as their scale.


_BLOCK = 32
_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class MXFP4Rows:
    """MXFP4 rows of a checkpoint: views of the mapped file."""

    blocks: NDArray[np.uint8]  # [rows, blocks, 16], two numbers a byte, the first in the lower bits
    scales: NDArray[np.uint8]  # [rows, blocks], each block's exponent plus 127

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[0], self.scales.shape[1] * _BLOCK

    def read(self) -> QuantizedRows | NDArray[np.float32]:
        """Return the exact values: Q8_0 if all scales fit float16 (any real model), else float32."""
        nibbles = np.stack([self.blocks & np.uint8(15), self.blocks >> np.uint8(4)], axis=-1)
        doubled = MXFP4_DOUBLED[nibbles].reshape(*self.scales.shape, _BLOCK)
        exponents = self.scales.astype(np.int32) - 128
        rows = q8_0_of_powers(exponents, doubled, self.shape)
        return (
            rows if rows is not None else np.ldexp(doubled.astype(np.float32), exponents[..., None]).reshape(self.shape)
        )


def unstacked(found: Iterable[tuple[str, NDArray[Any]]], config: ModelConfig) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a checkpoint; split each stack into views of its parts: arrays, or MXFP4Rows.

    Mismatched stacks, and those without scales, stay unsplit, so that `checked` rejects them.
    """
    stacks: dict[str, list[Part]] = defaultdict(list)
    for part in parts_of(spec_of(config)):
        if part.stack is not None:
            stacks[part.stack.name].append(part)
    waiting: dict[str, NDArray[Any]] = {}
    for name, array in found:
        stem = next((name.removesuffix(end) for end in (_BLOCKS, _SCALES) if name.endswith(end)), None)
        if stem in stacks:
            waiting[name] = array
            if stem + _BLOCKS in waiting and stem + _SCALES in waiting:
                blocks, scales = waiting.pop(stem + _BLOCKS), waiting.pop(stem + _SCALES)
                yield from _rows(stem, stacks[stem], blocks, scales)
        elif name in stacks and stacks[name][0].expert is None and len(array) == rows_of(stacks[name]):
            for part in stacks[name]:
                yield part.weight_name, array[part.rows]
        elif name in stacks and array.ndim == 3:
            stack = stacks[name][0].stack
            assert stack is not None
            yield from _parts(name, stacks[name], array if stack.outputs_first else array.swapaxes(1, 2), "weight")
        elif name.endswith(".bias") and (whole := f"{name.removesuffix('bias')}weight") in stacks:
            for part in stacks[whole] if len(array) == rows_of(stacks[whole]) else ():
                yield f"{part.name}.bias", array[part.rows]
        elif name.endswith("_bias") and name.removesuffix("_bias") in stacks and array.ndim == 2:
            yield from _parts(name, stacks[name.removesuffix("_bias")], array, "bias")
        else:
            yield name, array
    yield from waiting.items()


def rows_of(parts: Iterable[Part]) -> int:
    return sum(part.shape[0] for part in parts)


def reordered(weight: Weight, order: HeadOrder | None) -> Weight:
    """Return rows of whole heads in this project's order, or elements of a vector."""
    if order is None:
        return weight
    index = np.arange(weight.shape[0]).reshape(-1, order.dim)[:, order.rows()].ravel()
    return replace(weight, data=weight.data[index]) if isinstance(weight, QuantizedRows) else weight[index]


def _parts(name: str, parts: list[Part], array: NDArray[Any], kind: str) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the parts of an array [experts, outputs, ...]."""
    if not _fits(parts, array):
        yield name, array
        return
    for part in parts:
        assert part.stack is not None
        yield f"{part.name}.{kind}", array[part.expert, part.stack.start : part.stack.stop : part.stack.step]


def _rows(
    name: str, parts: list[Part], blocks: NDArray[np.uint8], scales: NDArray[np.uint8]
) -> Iterator[tuple[str, Any]]:
    are_bytes = blocks.dtype == scales.dtype == np.uint8
    if not are_bytes or scales.ndim != 3 or blocks.shape != (*scales.shape, _BLOCK // 2) or not _fits(parts, blocks):
        yield from ((name + _BLOCKS, blocks), (name + _SCALES, scales))
        return
    pairs = zip(_parts(name, parts, blocks, "weight"), _parts(name, parts, scales, "weight"), strict=True)
    for (part, some), (_, theirs) in pairs:
        yield part, MXFP4Rows(some, theirs)


def _fits(parts: list[Part], array: NDArray[Any]) -> bool:
    return len(array) == len({part.expert for part in parts})


# --------------------------------------------------------------------------------------------------------------- slices


_TYPES = {tensor_type.name: tensor_type for tensor_type in (*TENSOR_TYPES, *OWN_TYPES)}


def ranges_of(spec: DecoderSpec) -> dict[str, Ranges | None]:
    """Return the ranges of `spec` in every tensor, by the tensor's Hugging Face name; None: all of it."""
    ranges: dict[str, Ranges | None] = {}
    for part in parts_of(spec):
        ranges[part.weight_name] = part.ranges
        if part.bias:
            ranges[f"{part.name}.bias"] = None if part.ranges is None else part.ranges[:1]
    return ranges


def sliced(weight: Weight, ranges: Ranges | None) -> Weight:
    """Return these ranges of a tensor: a view if they consist of whole quantization blocks, else float32."""
    if ranges is None:
        return weight
    index = tuple(slice(*bounds) for bounds in ranges)
    if not isinstance(weight, QuantizedRows):
        return weight[index]
    shape, rows = tuple(stop - start for start, stop in ranges), weight.data[index[:-1]]
    (start, stop), kind = ranges[-1], _TYPES[weight.type]
    first, last = start // kind.block, -(-stop // kind.block)
    blocks = rows[..., first * kind.block_bytes : last * kind.block_bytes]
    if (last - first) * kind.block == stop - start:
        return QuantizedRows(weight.type, shape, blocks)
    around = QuantizedRows(weight.type, (*shape[:-1], (last - first) * kind.block), blocks).dequantize()
    return np.ascontiguousarray(around[..., start - first * kind.block : stop - first * kind.block])


# uint16 are the bits of bfloat16, which numpy does not know; other arrays are of a float type.
Weight = NDArray[Any] | QuantizedRows | PackedRows
