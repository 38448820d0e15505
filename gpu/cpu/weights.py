"""Weights in the structs of the C++ library: fields, packed matrices, and memory."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import cast

import numpy as np
from numpy.typing import NDArray

from gpu.checkpoint import ModelConfig, QuantizedRows
from gpu.checkpoint.architecture import (
    AttentionSpec,
    ClampedSwiGLUSpec,
    DecoderSpec,
    GatedDeltaSpec,
    MoESpec,
    Part,
    RMSNormSpec,
)
from gpu.checkpoint.encoder import EncoderLayerSpec, EncoderSpec
from gpu.checkpoint.quantized_rows import OWN_TYPES, TENSOR_TYPES
from gpu.checkpoint.tensors import Weight, checked
from gpu.cpu.library import (
    DeltaStruct,
    ExpertsStruct,
    ExpertStruct,
    LayerStruct,
    Library,
    MatrixStruct,
    ModelStruct,
    PartStruct,
)
from gpu.weights.reading import floats


class PackedWeights:
    """The weights of one model, or of one rank's part of it. It keeps the memory that the structs point to."""

    def __init__(self, library: Library, model: ModelStruct, spec: DecoderSpec, *, quantized: bool) -> None:
        """Fill the weights of `model`, with the layers of `spec`. `quantized` False rounds all to bfloat16."""
        self.matrices: list[PackedMatrix] = []
        self.tokens_of_experts: list[NDArray[np.int64]] = []
        self.deltas: list[DeltaStruct] = []
        self._library, self._model, self._spec, self._quantized = library, model, spec, quantized
        self._buffer = WeightBuffer()
        self._vectors: list[NDArray[np.float32]] = []
        self._experts: list[object] = []
        self._integers = isinstance(spec, EncoderSpec) and multiplies_integers(library)

    def load(self, weights: Iterable[tuple[str, Weight]], config: ModelConfig) -> None:
        """Pack every matrix as soon as its parts are read, so that memory holds little more than the model. Raises
        ModelError if the weights are not those of the spec."""
        groups = self._groups()
        waiting: dict[str, Weight] = {}
        for name, weight in checked(weights, config, source="The checkpoint", spec=self._spec):
            waiting[name] = weight
            group = groups[name]
            if all(member in waiting for member in group.members):
                group.take([waiting.pop(member) for member in group.members])

    def _groups(self) -> dict[str, _Group]:
        """Return the group of each tensor, by its name."""
        spec, groups = self._spec, list[_Group]()

        def matrix(owner: object, field: str, *parts: Part, interleave: bool = False) -> None:
            take = partial(self._set_matrix, owner, field, interleave)
            groups.append(_Group([part.weight_name for part in parts], take))

        def vector(owner: object, field: str, *names: str) -> None:
            groups.append(_Group(list(names), partial(self._set_vector, owner, field)))

        def norm(owner: object, field: str, spec: RMSNormSpec | None) -> None:
            if spec is not None:
                biases = [f"{spec.weight.name}.bias"] if spec.weight.bias else []
                take = partial(self._set_vector, owner, field, zeros=spec.weight.shape[0])
                groups.append(_Group([spec.weight.weight_name, *biases], take))

        def bias(owner: object, field: str, *parts: Part) -> None:
            if parts[0].bias:
                vector(owner, field, *(f"{part.name}.bias" for part in parts))

        for struct, layer in zip(self._model.layers[: len(spec.layers)], spec.layers, strict=True):
            attention, network = layer.attention, layer.feed_forward
            norms: tuple[RMSNormSpec | None, ...] = (layer.attention_norm, layer.attention_post_norm)
            norms += (layer.feed_forward_norm, layer.feed_forward_post_norm)
            if isinstance(attention, AttentionSpec):
                matrix(struct, "qkv", *attention.qkv)
                bias(struct, "qkv_bias", *attention.qkv)
                norms += attention.qk_norm or ()
                struct.norm_together = attention.norm_together
                if attention.sinks is not None:
                    vector(struct.heads, "sinks", attention.sinks.weight_name)
            else:
                groups += self._delta_groups(struct, attention, matrix, vector)
            fields = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm", "q_norm", "k_norm")
            for field, further in zip(fields, norms, strict=False):
                norm(struct, field, further)
            matrix(struct, "out", attention.out)
            bias(struct, "out_bias", attention.out)
            if isinstance(network, MoESpec):
                groups += self._expert_groups(struct, network, matrix, vector)
                continue
            if cast("Part | None", network.gate) is None:  # networks of encoders
                matrix(struct, "gate_up", network.up)
                bias(struct, "gate_up_bias", network.up)
            else:
                matrix(struct, "gate_up", network.gate, network.up, interleave=True)  # interleaved by tile
            matrix(struct, "down", network.down)
            bias(struct, "down_bias", network.down)
            if isinstance(layer, EncoderLayerSpec):
                norm(struct, "attention_sum_norm", layer.attention_sum_norm)
                norm(struct, "mlp_sum_norm", layer.feed_forward_sum_norm)
        norm(self._model, "final_norm", spec.norm)
        if isinstance(spec, EncoderSpec):
            norm(self._model, "embedding_norm", spec.embedding_norm)
            added = [part.weight_name for part in (spec.positions, spec.token_types) if part is not None]
            groups.append(_Group(added, self._set_added))
        if spec.embedding is not None:
            matrix(self._model, "embedding", spec.embedding)
        if spec.head is not None:
            matrix(self._model, "head", spec.head)
        return {member: group for group in groups for member in group.members}

    def _delta_groups(
        self, layer: LayerStruct, spec: GatedDeltaSpec, matrix: Callable[..., None], vector: Callable[..., None]
    ) -> list[_Group]:
        """Return the groups of a gated delta net's parts; `matrix` and `vector` are those of `_groups`."""
        delta = DeltaStruct(
            key_heads=spec.key_heads,
            value_heads=spec.value_heads,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            tokens=spec.conv[0].shape[2],
            by_key_head=spec.by_key_head,
            tiled=spec.tiled,
        )
        layer.delta = ctypes.pointer(delta)
        self.deltas.append(delta)
        matrix(layer, "qkv", *spec.projections)
        for field, part in zip(("dt_bias", "a_log", "norm"), spec.vectors, strict=True):
            vector(delta, field, part.weight_name)
        return [_Group([part.weight_name for part in spec.conv], partial(self._set_conv, delta))]

    def _set_conv(self, delta: DeltaStruct, parts: Sequence[Weight]) -> None:
        """Set the weights of a convolution, by token."""
        of_channels = np.concatenate([floats(part).reshape(-1, delta.tokens) for part in parts])
        self._set_vector(delta, "conv", [np.ascontiguousarray(of_channels.T)])

    def _expert_groups(
        self, layer: LayerStruct, spec: MoESpec, matrix: Callable[..., None], vector: Callable[..., None]
    ) -> list[_Group]:
        """Return the groups of a layer's experts; `matrix` and `vector` are those of `_groups`."""
        network, groups = spec.experts[0], list[_Group]()
        each = (ExpertStruct * len(spec.experts))()
        tokens = np.zeros(spec.router.shape[0], dtype=np.int64)
        experts = ExpertsStruct(
            experts=ctypes.cast(each, ctypes.POINTER(ExpertStruct)),
            first=spec.first,
            here=len(spec.experts),
            count=len(tokens),
            top_k=spec.top_k,
            normalized=spec.normalized,
            tokens=tokens.ctypes.data,
        )
        if isinstance(network, ClampedSwiGLUSpec):
            experts.alpha, experts.limit = network.alpha, network.limit
        layer.experts = ctypes.pointer(experts)
        self.tokens_of_experts.append(tokens)
        self._experts += [each, experts]
        vector(experts, "router", spec.router.weight_name)
        if spec.router.bias:
            vector(experts, "router_bias", f"{spec.router.name}.bias")
        shared = [] if spec.shared is None else [(ExpertStruct(), spec.shared)]
        for struct, _ in shared:
            experts.shared = ctypes.pointer(struct)
            self._experts.append(struct)
        if spec.shared_gate is not None:
            vector(experts, "shared_gate", spec.shared_gate.weight_name)
        for struct, expert in (*zip(each, spec.experts, strict=True), *shared):
            matrix(struct, "gate_up", expert.gate, expert.up, interleave=True)
            matrix(struct, "down", expert.down)
            if expert.gate.bias:
                names = [f"{expert.gate.name}.bias", f"{expert.up.name}.bias"]
                groups.append(_Group(names, partial(self._set_interleaved, struct, "gate_up_bias")))
            if expert.down.bias:
                vector(struct, "down_bias", f"{expert.down.name}.bias")
        return groups

    def _set_interleaved(self, owner: object, field: str, parts: Sequence[Weight]) -> None:
        """Set the biases of matrices that are interleaved by tile."""
        tiles = np.stack([floats(part).reshape(-1, LANES) for part in parts], axis=1)
        self._set_vector(owner, field, [tiles])

    def _set_matrix(self, owner: object, field: str, interleave: bool, parts: Sequence[Weight]) -> None:
        matrix = pack(
            self._library,
            self._buffer,
            parts,
            interleave=interleave,
            quantized=self._quantized,
            integers=self._integers,
        )
        self.matrices.append(matrix)
        setattr(owner, field, matrix.struct)

    def _set_added(self, parts: Sequence[Weight]) -> None:
        """Set the sums of each token type's row and each position's, for one type after the other."""
        sums = floats(parts[0])
        for types in parts[1:]:
            sums = floats(types)[:, None] + sums
        self._set_vector(self._model, "added", [sums])

    def _set_vector(self, owner: object, field: str, parts: Sequence[Weight], zeros: int = 0) -> None:
        padding = np.zeros(max(zeros, LANES), dtype=np.float32)  # vectors are read in whole tiles
        vector = np.concatenate([*(floats(part).ravel() for part in parts), padding])
        self._vectors.append(vector)
        setattr(owner, field, vector.ctypes.data)


@dataclass(frozen=True)
class _Group:
    """Tensors that become one field of a struct, in the order of `take`."""

    members: list[str]
    take: Callable[[Sequence[Weight]], None]


# ------------------------------------------------------------------------------------------------------------- matrices
# Weights in the forms that the library computes with. csrc/matrix.h describes their layouts.


U4, U5, U8, BF16, K4, K5, K6, S8, S16, I16 = 4, 5, 8, 16, 44, 45, 46, 108, 116, 216  # `headrace::Form`
FORMS = {  # for the log
    U4: "4-bit",
    U5: "5-bit",
    U8: "8-bit",
    BF16: "bfloat16",
    K4: "4-bit K",
    K5: "5-bit K",
    K6: "6-bit K",
    S8: "8-bit S",
    S16: "bfloat16 S",
    I16: "16-bit integer",
}
LANES = 16  # outputs of one tile
_MOST_PARTS = 3  # of a matrix, each of one form
ROWS_AT_ONCE = 4096  # rows that are widened to float32 and packed at a time

# Types with blocks that are used unchanged, and their forms. Most others become one of them, which holds the same
# numbers (`QuantizedRows.in_served_type`, MXFP4 Q8_0). Q2_K is rounded to U8, with steps of 1/127 of a block's largest
# weight, much finer than its own. Steps are float16, so at least 6e-8: blocks without a weight above 1e-4 lose bits,
# and weights below 3e-8 become zero.
_AS_THEY_ARE = {"Q4_0": U4, "Q4_1": U4, "Q5_0": U5, "Q5_1": U5, "Q8_0": U8, "Q4_K": K4, "Q5_K": K5, "Q6_K": K6}
_AS_THEY_ARE |= {"S8": S8, "S16": S16}
_NUMBERS = {tensor_type.name: tensor_type.number for tensor_type in (*TENSOR_TYPES, *OWN_TYPES)}
# The offset of these types, in scales. If scale times offset does not fit float16, U8 holds the same numbers.
_OFFSETS = {"Q4_0": 8, "Q5_0": 16}
_LARGEST_HALF = 65504.0
_BLOCK = 32  # weights that share a scale in U8


class PackedMatrix:
    """One [rows, cols] matrix. `struct` points into `data`, which must outlive every use of it."""

    def __init__(self, library: Library, buffer: WeightBuffer, parts: Sequence[tuple[int, int]], cols: int) -> None:
        """Reserve memory for `parts`, pairs of a form and a number of rows: a multiple of LANES, except for the
        last."""
        self.forms = {form for form, _ in parts}
        self.struct = MatrixStruct(rows=sum(rows for _, rows in parts), cols=cols)
        tiles = [-(-rows // LANES) for _, rows in parts]
        sizes = [
            count * library.functions.hr_tile_bytes(self.struct, form)
            for (form, _), count in zip(parts, tiles, strict=True)
        ]
        self.data = buffer.take(sum(sizes))
        at = self.data.ctypes.data
        for index, ((form, _), count, size) in enumerate(zip(parts, tiles, sizes, strict=True)):
            self.struct.parts[index] = PartStruct(form=form, tiles=count, data=at)
            at += size


def pack(
    library: Library,
    buffer: WeightBuffer,
    weights: Sequence[Weight],
    *,
    interleave: bool = False,
    quantized: bool = True,
    integers: bool = False,
) -> PackedMatrix:
    """Pack matrices into one, stacked by rows; with `interleave`, two matrices with alternating tiles.

    A matrix keeps the numbers of its file if the library has a form for them; other quantized types become U8,
    and all else bfloat16, or with `integers` I16. `quantized` False makes everything bfloat16. Matrices that are
    interleaved, do not fill whole tiles, or have more than three forms in turn, get one form: their own if it is the
    same, else U8 if all are quantized. U8 holds Q4_0, Q5_0 and MXFP4 exactly, and other types within half a step: 1/254
    of the largest weight of 32.
    """
    if quantized:
        weights = [_as_it_is_taken(weight) for weight in weights]
    forms = [_form(weight) if quantized else BF16 for weight in weights]
    if integers and quantized and set(forms) == {BF16}:  # all parts of a matrix, because they share its inputs
        forms = [I16] * len(forms)
    rows, cols = [weight.shape[0] for weight in weights], weights[0].shape[1]
    turns = [
        (form, sum(count for _, count in run))
        for form, run in itertools.groupby(zip(forms, rows, strict=True), key=itemgetter(0))
    ]
    if interleave or len(turns) > _MOST_PARTS or any(count % LANES for count in rows[:-1]):
        common = forms[0] if len(set(forms)) == 1 else BF16 if BF16 in forms else U8
        if common == U8:
            weights = [_exact_in_8_bits(weight) for weight in weights]
        matrix = PackedMatrix(library, buffer, [(common, sum(rows))], cols)
        forms = [common] * len(forms)
    else:
        matrix = PackedMatrix(library, buffer, turns, cols)
    first = 0
    for weight, form in zip(weights, forms, strict=True):
        _pack_rows(library, matrix, weight, form, first, len(weights) if interleave else 1)
        first += LANES if interleave else weight.shape[0]
    return matrix


def multiplies_integers(library: Library) -> bool:
    """Return True if I16 is the fastest form of this build."""
    return library.functions.hr_tile_bytes(MatrixStruct(rows=LANES, cols=_BLOCK), I16) == _BLOCK * LANES * 2 + LANES * 4


def _as_it_is_taken(weight: Weight) -> Weight:
    """Return the weight in a type that the library uses without a loss; unchanged if there is none."""
    if not isinstance(weight, QuantizedRows) or weight.shape[1] % _BLOCK:
        return weight
    if weight.type == "MXFP4":
        return weight.as_q8_0() or floats(weight)  # bfloat16 holds them, too, in twice the memory
    if weight.type in _OFFSETS:
        blocks = weight.data.reshape(-1, weight.data.shape[-1] * _BLOCK // weight.shape[1])
        scales = np.abs(np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32))
        if np.any(np.isfinite(scales) & (scales > _LARGEST_HALF / _OFFSETS[weight.type])):
            return weight.as_q8_0() or weight
    return weight.in_served_type() or weight


def _exact_in_8_bits(weight: Weight) -> Weight:
    return (weight.as_q8_0() or weight) if isinstance(weight, QuantizedRows) else weight


def _form(weight: Weight) -> int:
    if not isinstance(weight, QuantizedRows) or weight.shape[1] % _BLOCK:
        return BF16
    return _AS_THEY_ARE.get(weight.type, U8)


def _pack_rows(library: Library, matrix: PackedMatrix, weight: Weight, form: int, first: int, turns: int) -> None:
    """Pack a weight's rows into the matrix from row `first` on, into one of every `turns` tiles."""
    if isinstance(weight, QuantizedRows) and _form(weight) == form and weight.type in _AS_THEY_ARE:
        rows, kind = np.ascontiguousarray(weight.data), _NUMBERS[weight.type]
        library.functions.hr_pack_blocks(matrix.struct, kind, _pointer(rows), rows.shape[1], first, len(rows), turns)
        return
    # Some rows at a time, because an embedding in float32 may be larger than the whole model.
    for start in range(0, weight.shape[0], ROWS_AT_ONCE):
        part = np.ascontiguousarray(floats(weight[start : start + ROWS_AT_ONCE]))
        library.functions.hr_pack_floats(matrix.struct, _pointer(part), first + start * turns, len(part), turns)


def _pointer(array: NDArray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


# --------------------------------------------------------------------------------------------------------------- memory
# Memory that every step reads from end to end, in huge pages if the kernel has them: with 4 KiB pages, each tile of the
# KV cache is in another page, and translating its address costs as much as reading it.


ALIGNMENT = 64  # bytes: a cache line, and one vector of the library
_CHUNK = 32 * 2**20


def zeros(num_bytes: int) -> NDArray[np.uint8]:
    """Return zeroed uint8 [num_bytes], aligned to a page. The system commits it at the first write."""
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, num_bytes)


class WeightBuffer:
    """Allocates from larger chunks of memory, for arrays that live as long as the model."""

    def __init__(self) -> None:
        self._chunk = np.empty(0, dtype=np.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return zeroed uint8 [num_bytes], aligned to ALIGNMENT. It keeps its whole chunk alive."""
        if self._used + num_bytes > len(self._chunk):
            self._chunk, self._used = zeros(max(_CHUNK, num_bytes)), 0
        piece = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return piece
