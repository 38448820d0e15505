"""Linear layers, norms, rotary embedding, activations, embeddings, and their weights.

1. A layer is made from parts of a model (`gpu.checkpoint.architecture`), and owns their parameters. `weight_slots` has
   the tensors under their names in a checkpoint, whatever the layer merges or packs.
2. Layers are for inference only: parameters are created empty and need no gradient, and the caller runs them under
   `torch.inference_mode()`. Operations that a kernel fuses are one call here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn

from gpu import kernels
from gpu.checkpoint.architecture import Heads, Part, RMSNormSpec, Rope
from gpu.kernels import add_rms_norm, gather_rows
from gpu.kernels.dispatch import on_triton
from gpu.kernels.product import linear
from gpu.kernels.quantized import QuantizedLinear
from gpu.rotary import query_scales, rotations
from gpu.sharding import Communicator
from gpu.weights.tensors import QuantizedMatrix


class Product(nn.Module):
    """A matrix product. Layers derive from it."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        # Computes with another form of the matrix, in place of `weight`, from input and bias.
        self._packed: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[R, in_features] -> [R, out_features]"""
        if self._packed is not None:
            return self._packed(x, self.bias)
        return linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Pack the matrix if that is faster. Called once, when all weights of the model are loaded."""
        if (packed := pack(self.weight)) is not None:
            self._packed = partial(packed_linear, packed)
            del self.weight


class Linear(Product):
    """One or several linear layers on the same input, as one matrix product, which reads its input once and needs one
    launch. The output concatenates the parts' outputs in order. Where `place.keeps_packed`, `weight` has no memory
    until the parts are loaded (`hold`), since they may be quantized."""

    def __init__(self, *parts: Part, place: Place) -> None:
        out_features, in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
        matrices = replace(place, device="meta") if place.keeps_packed else place
        super().__init__(
            matrices.parameter(out_features, in_features), place.parameter(out_features) if parts[0].bias else None
        )
        self.parts = parts
        self._held: dict[str, torch.Tensor | QuantizedMatrix] = {}

    def hold(self, name: str, weight: torch.Tensor | QuantizedMatrix) -> None:
        """Keep the weight of a part until `pack`."""
        self._held[name] = weight if isinstance(weight, QuantizedMatrix) else weight.to(self.weight.dtype)

    def pack(self) -> None:
        if not self._held:
            return super().pack()
        parts = [self._held.pop(part.weight_name) for part in self.parts]
        plain = [part for part in parts if isinstance(part, torch.Tensor)]
        if len(plain) < len(parts):
            self._packed = QuantizedLinear(parts)
            del self.weight
        else:
            self.weight = nn.Parameter(torch.cat(plain), requires_grad=False)
        return None

    @property
    def is_quantized(self) -> bool:
        return isinstance(self._packed, QuantizedLinear)

    def weight_slots(self) -> Iterator[tuple[str, torch.Tensor]]:
        rows = [part.shape[0] for part in self.parts]
        for part, weight in zip(self.parts, self.weight.split(rows), strict=True):
            yield part.weight_name, weight
        if self.bias is not None:
            for part, bias in zip(self.parts, self.bias.split(rows), strict=True):
                yield f"{part.name}.bias", bias


class RowLinear(Linear):
    """A linear layer with inputs split over ranks: each rank multiplies its inputs, and the products are added."""

    def __init__(self, part: Part, place: Place) -> None:
        super().__init__(part, place=place)
        self._communicator = place.communicator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[R, in_features of this rank] -> [R, out_features]"""
        product = super().forward(x)
        if self._communicator is not None:
            self._communicator.all_reduce_(product)
        return product


# --------------------------------------------------------------------------------------------------------------- rotary
# Rotary position embedding, by the angles of `gpu.rotary`. Angles depend on positions only, so all layers of a step
# share them. Pairs are (i, i + head_dim / 2), the half-split order of Hugging Face checkpoints.


class RotaryEmbedding(nn.Module):
    """The cosines and sines of every position below `max_positions`.

    The table is as long as the longest served context, not as the checkpoint allows: with 128 dimensions in bfloat16 it
    takes 64 MiB for 128k positions, 4 MiB for 8k. That length depends on the KV cache, so `resize` makes a new table.
    """

    table: torch.Tensor

    def __init__(self, head_dim: int, max_positions: int, rope: Rope, place: Place) -> None:
        super().__init__()
        self._rope = rope
        self.query_scales: torch.Tensor | None = None  # float32 [max_positions], see `gpu.rotary`
        table = torch.empty(2, 0, head_dim, dtype=place.dtype, device=place.device)
        self.register_buffer("table", table, persistent=False)
        self.resize(max_positions)

    def resize(self, max_positions: int) -> None:
        half = self.table.shape[2] // 2
        self.table = torch.empty(2, max_positions, 2 * half, dtype=self.table.dtype, device=self.table.device)
        scales = query_scales(max_positions, self._rope.scaling)
        self.query_scales = None if scales is None else torch.from_numpy(scales).to(self.table.device)
        for positions, *parts in rotations(max_positions, 2 * half, self._rope):
            cos, sin = (torch.from_numpy(part).to(self.table.device) for part in parts)
            # The sines have the sign of the half-split rotation, which saves an operation per layer.
            self.table[0, positions, :half] = self.table[0, positions, half:] = cos
            self.table[1, positions, :half], self.table[1, positions, half:] = -sin, sin

    def forward(self, positions: torch.Tensor) -> Rotation:
        """Return the rotation of tokens at these positions, int64 [T]."""
        return Rotation(positions, self.table, self.query_scales)


@dataclass(frozen=True)
class Rotation:
    """The rotation of the T tokens of a step, shared by all layers."""

    positions: torch.Tensor  # int64 [T]
    table: torch.Tensor  # [2, max_positions, head_dim], cosines and signed sines
    query_scales: torch.Tensor | None = None  # float32 [max_positions]

    @cached_property
    def angles(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines for `rotate_`, each [T, 1, head_dim]; looked up once, and only if they are used."""
        cos, sin = self.table.index_select(1, self.positions).unsqueeze(2).unbind()
        return cos, sin


def rotate_(qk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate every head of `qk` [T, heads, head_dim] in place: queries and keys side by side, in one call."""
    swapped = qk.roll(qk.shape[-1] // 2, dims=-1)
    qk.mul_(cos).addcmul_(swapped, sin)


# ----------------------------------------------------------------------------------------------------------------- norm
# Root-mean-square normalization (Zhang and Sennrich, arXiv:1910.07467), with statistics in float32 for any dtype.


class RMSNorm(nn.Module):
    """Adds the last sublayer's output to the residual stream, and normalizes the sum."""

    def __init__(self, spec: RMSNormSpec, place: Place) -> None:
        super().__init__()
        self.spec = spec
        self.shape, self.eps = spec.weight.shape, spec.eps
        self.weight = place.parameter(*self.shape, dtype=_dtype(spec, place))

    def forward(self, residual: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """Add `delta` to `residual` in place, if given; return the normalized residual. All [T, size], or of more
        dimensions, for which there is no kernel."""
        if on_triton(residual) and residual.ndim == 2:
            return add_rms_norm(residual, delta, self.weight, self.eps)
        if delta is not None:
            residual.add_(delta)
        return F.rms_norm(residual.to(self.weight.dtype), self.shape, self.weight, self.eps).to(residual.dtype)

    def weight_slots(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield self.spec.weight.weight_name, self.weight


class QKNorm(nn.Module):
    """RMSNorm over each query and key head (Qwen3): one weight for all query heads, one for all key heads. One call
    normalizes both, since the merged projection has them in one tensor."""

    head_index: torch.Tensor

    def __init__(self, specs: tuple[RMSNormSpec, ...], heads: Heads, place: Place) -> None:
        super().__init__()
        self.specs = specs
        self.shape, self.eps = specs[0].weight.shape, specs[0].eps
        self.weight = place.parameter(2, heads.dim, dtype=_dtype(specs[0], place))  # for queries, for keys
        rows = [0] * heads.query + [1] * heads.kv
        self.register_buffer("head_index", torch.tensor(rows, device=place.device), persistent=False)

    def forward(self, qk: torch.Tensor) -> torch.Tensor:
        """[T, num_heads + num_kv_heads, head_dim], queries first -> the same, normalized and contiguous"""
        normed = F.rms_norm(qk.to(self.weight.dtype), self.shape, None, self.eps)
        return normed.mul_(self.weight.index_select(0, self.head_index)).to(qk.dtype)

    def weight_slots(self) -> Iterator[tuple[str, torch.Tensor]]:
        for spec, weight in zip(self.specs, self.weight, strict=True):
            yield spec.weight.weight_name, weight


def _dtype(spec: RMSNormSpec, place: Place) -> torch.dtype:
    """Return float32 for weights that are sums (`Part.offset`), so that they are not rounded."""
    return torch.float32 if spec.weight.offset else place.dtype


# -------------------------------------------------------------------------------------------------------------- weights


@runtime_checkable
class HoldsWeights(Protocol):
    """A layer with weights from a checkpoint."""

    def weight_slots(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a name in the checkpoint and the memory for that tensor: a parameter, or rows of a merged one."""


def weight_slots(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the memory for every tensor of the model, by its name in a checkpoint."""
    layers = (layer for layer in model.modules() if isinstance(layer, HoldsWeights))
    return {name: slot for layer in layers for name, slot in layer.weight_slots()}


@dataclass(frozen=True)
class Place:
    """The type and device of a model's weights, and the communicator to the ranks with the other parts."""

    dtype: torch.dtype
    device: torch.device | str
    communicator: Communicator | None = None  # None: there are no other tensor ranks
    keeps_packed: bool = False  # linear layers may be quantized, see `gpu.kernels.quantized`

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        """Return an uninitialized weight. Loading the model writes all of it."""
        data = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return torch.nn.Parameter(data, requires_grad=False)


# ------------------------------------------------------------------------------------------------------------ embedding


class Embedding(nn.Module):
    """One row per token of the vocabulary, times a scale. Each tensor rank has the rows of some tokens."""

    def __init__(self, part: Part, scale: float, place: Place) -> None:
        super().__init__()
        self.part = part
        self._communicator = place.communicator
        self._first_token = 0 if part.ranges is None else part.ranges[0][0]
        self._scale = None if scale == 1.0 else scale
        self.weight = place.parameter(*part.shape)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, hidden], a new tensor"""
        gather = gather_rows if on_triton(self.weight) else torch.embedding
        if self._communicator is None:
            rows = gather(self.weight, input_ids)
        else:
            own = input_ids - self._first_token
            others = (own < 0) | (own >= len(self.weight))
            rows = gather(self.weight, own.masked_fill_(others, 0)).masked_fill_(others.unsqueeze(1), 0.0)
            self._communicator.all_reduce_(rows)
        return rows if self._scale is None else rows.mul_(self._scale)

    def weight_slots(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield self.part.weight_name, self.weight


class LMHead(Product):
    """The logits of the vocabulary, or of this rank's part of it, [R, hidden] -> [R, vocab]. Without a `part`, the
    matrix is the embedding's."""

    def __init__(self, part: Part | None, embedding: Embedding | None, place: Place) -> None:
        if part is not None:
            super().__init__(place.parameter(*part.shape))
        else:
            assert embedding is not None
            super().__init__(embedding.weight)
        self.part = part

    def weight_slots(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.part is not None:
            yield self.part.weight_name, self.weight


# ----------------------------------------------------------------------------------------------------------- activation


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU without its matrices (Shazeer, arXiv:2002.05202): [T, 2 * n], gate first -> silu(gate) * up, [T, n]"""
    if on_triton(gate_up):
        return kernels.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """GeGLU without its matrices, with the tanh for gelu: [T, 2 * n], gate first -> gelu(gate) * up, [T, n]"""
    if on_triton(gate_up):
        return kernels.gelu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


# --------------------------------------------------------------------------------------------------------------- packed
# Matrices in oneDNN's tiled layout. oneDNN converts a plain matrix in every call, which for few rows takes as long as
# the product: a head of 49,152 x 576 in bfloat16 takes 6.9 ms plain and 4.2 ms packed, for one row on one core. The
# results are the same bits.


def pack(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the packed form of an [out, in] matrix for `packed_linear`, None where it is not faster: packing is faster
    for bfloat16 on a CPU with bfloat16 instructions."""
    if (
        weight.device.type != "cpu"
        or weight.dtype != torch.bfloat16
        or not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return None
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return packed


def packed_linear(packed: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `torch.nn.functional.linear` with a packed matrix: [..., in] -> [..., out]"""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product
