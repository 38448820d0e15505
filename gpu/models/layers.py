"""Linear layers, norms, rotary embedding, activations, embeddings, and their weights.

Each layer is made from the parts of a model that it computes with (`gpu.checkpoint.architecture`), owns their
parameters and loads them under their names, so that merging or packing weights never shows in a model file. A linear
layer has `forward` and `weight_slots`; a packed, quantized or sharded one is another class with these two methods.
Layers are for inference only: parameters are created empty and need no gradient, and the caller runs them under
`torch.inference_mode()`. Operations that a kernel fuses are one call here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn

from gpu import kernels
from gpu.checkpoint import RopeScaling
from gpu.checkpoint.architecture import Heads, Part, RMSNormSpec
from gpu.kernels import add_rms_norm, gather_rows
from gpu.kernels.dispatch import on_triton
from gpu.rotary import rotations
from gpu.sharding import Communicator


class Product(nn.Module):
    """A matrix, and how something is multiplied by it. Made by the layers that own one."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._packed: torch.Tensor | None = None  # instead of `weight` once it is loaded, where that is faster

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[R, in_features] -> [R, out_features]"""
        if self._packed is not None:
            return packed_linear(x, self._packed, self.bias)
        return F.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        self._packed = pack(self.weight)
        if self._packed is not None:
            del self.weight


class Linear(Product):
    """One or several linear layers on the same input, as one matrix product.

    The parts lie in the output in their order. One large product reads its input once and costs one launch instead of
    three.
    """

    def __init__(self, *parts: Part, place: Place) -> None:
        out_features, in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
        super().__init__(
            place.parameter(out_features, in_features), place.parameter(out_features) if parts[0].bias else None
        )
        self.parts = parts

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        rows = [part.shape[0] for part in self.parts]
        for part, weight in zip(self.parts, self.weight.split(rows), strict=True):
            yield part.weight_name, WeightSlot.into(weight)
        if self.bias is not None:
            for part, bias in zip(self.parts, self.bias.split(rows), strict=True):
                yield f"{part.name}.bias", WeightSlot.into(bias)


class RowLinear(Linear):
    """A linear layer whose inputs lie on several ranks: each multiplies its own, and the products are added up."""

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
# Rotary position embedding, by the angles of `gpu.rotary`.
#
# Imported by gpu.models. Angles depend on positions only, so all layers of a step share them. Pairs
# are (i, i + head_dim / 2), the half-split order of Hugging Face checkpoints.


class RotaryEmbedding(nn.Module):
    """The cosines and sines of every position below `max_positions`.

    The table is made for the longest context that is served, not for the longest the checkpoint allows: at 128k
    positions and 128 dimensions it is 64 MiB in bfloat16, at 8k it is 4 MiB. What is served is known when the KV
    cache is, so `resize` makes the table anew.
    """

    table: torch.Tensor

    def __init__(
        self, head_dim: int, max_positions: int, theta: float, scaling: RopeScaling | None, place: Place
    ) -> None:
        super().__init__()
        self._angles = (head_dim, theta, scaling)
        table = torch.empty(2, 0, head_dim, dtype=place.dtype, device=place.device)
        self.register_buffer("table", table, persistent=False)
        self.resize(max_positions)

    def resize(self, max_positions: int) -> None:
        """Make the table as long as `max_positions`."""
        half = self.table.shape[2] // 2
        self.table = torch.empty(2, max_positions, 2 * half, dtype=self.table.dtype, device=self.table.device)
        for positions, *parts in rotations(max_positions, *self._angles):
            cos, sin = (torch.from_numpy(part).to(self.table.device) for part in parts)
            # The sign of the half-split rotation lies in the sine, so that it costs no operation per layer.
            self.table[0, positions, :half] = self.table[0, positions, half:] = cos
            self.table[1, positions, :half], self.table[1, positions, half:] = -sin, sin

    def forward(self, positions: torch.Tensor) -> Rotation:
        """The rotation of tokens at these positions, int64 [T]."""
        return Rotation(positions, self.table)


@dataclass(frozen=True)
class Rotation:
    """Of the T tokens of a step, for all layers."""

    positions: torch.Tensor  # int64 [T]
    table: torch.Tensor  # [2, max_positions, head_dim], cosines and signed sines

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
# Root-mean-square normalization (Zhang and Sennrich, arXiv:1910.07467). Imported by gpu.models.
#
# Statistics are taken in float32 whatever the dtype of the input, as Hugging Face does.


class RMSNorm(nn.Module):
    """Normalizes the residual stream, and first adds to it what the last sublayer contributed."""

    def __init__(self, spec: RMSNormSpec, place: Place) -> None:
        super().__init__()
        self.spec = spec
        self.shape, self.eps = spec.weight.shape, spec.eps
        self.weight = place.parameter(*self.shape, dtype=_dtype(spec, place))

    def forward(self, residual: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """Add `delta` to `residual` in place, if given; return the normalized residual. All [T, size]."""
        if on_triton(residual):
            return add_rms_norm(residual, delta, self.weight, self.eps)
        if delta is not None:
            residual.add_(delta)
        return F.rms_norm(residual.to(self.weight.dtype), self.shape, self.weight, self.eps).to(residual.dtype)

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield self.spec.weight.weight_name, WeightSlot.into(self.weight)


class QKNorm(nn.Module):
    """RMSNorm over each query and key head (Qwen3): one weight for all query heads, one for all key heads.

    Queries and keys lie side by side in the merged projection, so one call takes both.
    """

    head_index: torch.Tensor

    def __init__(self, specs: tuple[RMSNormSpec, RMSNormSpec], heads: Heads, place: Place) -> None:
        super().__init__()
        self.specs = specs
        self.shape, self.eps = specs[0].weight.shape, specs[0].eps
        self.weight = place.parameter(2, heads.dim, dtype=_dtype(specs[0], place))  # of the queries, of the keys
        rows = [0] * heads.query + [1] * heads.kv
        self.register_buffer("head_index", torch.tensor(rows, device=place.device), persistent=False)

    def forward(self, qk: torch.Tensor) -> torch.Tensor:
        """[T, num_heads + num_kv_heads, head_dim], queries first -> the same, normalized and contiguous"""
        normed = F.rms_norm(qk.to(self.weight.dtype), self.shape, None, self.eps)
        return normed.mul_(self.weight.index_select(0, self.head_index)).to(qk.dtype)

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        for spec, weight in zip(self.specs, self.weight, strict=True):
            yield spec.weight.weight_name, WeightSlot.into(weight)


def _dtype(spec: RMSNormSpec, place: Place) -> torch.dtype:
    """Weights that are sums are kept as precise as they are computed."""
    return torch.float32 if spec.weight.offset else place.dtype


# -------------------------------------------------------------------------------------------------------------- weights
# The way of a checkpoint tensor into a layer. Implemented by the layers, walked by models.


@dataclass(frozen=True)
class WeightSlot:
    """The place of one checkpoint tensor: the shape it must have, and how it is taken in.

    `load` copies and converts dtype and device; it keeps no reference to the tensor. A layer that packs its weights
    does so in its own `load`.
    """

    shape: tuple[int, ...]
    load: Callable[[torch.Tensor], object]

    @staticmethod
    def into(target: torch.Tensor) -> WeightSlot:
        """The slot of a tensor that is kept as it comes, in `target`: a parameter, or rows of a merged one."""
        return WeightSlot(tuple(target.shape), target.copy_)


@runtime_checkable
class HoldsWeights(Protocol):
    """A layer that takes tensors from a checkpoint."""

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        """Everything that this layer holds, by the checkpoint's names."""
        ...


@runtime_checkable
class Packs(Protocol):
    """A layer that keeps its weight in another form for computing."""

    def pack(self) -> None:
        """Called once, when all weights of the model are loaded."""
        ...


def weight_slots(model: torch.nn.Module) -> dict[str, WeightSlot]:
    """Every tensor that the model needs, by its checkpoint name."""
    layers = (layer for layer in model.modules() if isinstance(layer, HoldsWeights))
    return {name: slot for layer in layers for name, slot in layer.weight_slots()}


@dataclass(frozen=True)
class Place:
    """Where the weights of a model are: in which type, on which device, and who has the other parts of them."""

    dtype: torch.dtype
    device: torch.device | str
    communicator: Communicator | None = None  # to the other tensor ranks; None: there are none

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        """An uninitialized weight: whatever loads the model writes all of it, so no time goes into random values."""
        data = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return torch.nn.Parameter(data, requires_grad=False)


# ------------------------------------------------------------------------------------------------------------ embedding
# The two ends of a model: token ids to vectors, and vectors to logits. Imported by gpu.models.


class Embedding(nn.Module):
    """One row per token of the vocabulary, times a scale, which is rounded to the dtype as Hugging Face does. Each
    tensor rank has the rows of some tokens."""

    def __init__(self, part: Part, scale: float, place: Place) -> None:
        super().__init__()
        self.part = part
        self._communicator = place.communicator
        self._first_token = 0 if part.ranges is None else part.ranges[0][0]
        self._scale = None if scale == 1.0 else torch.tensor(scale, dtype=place.dtype).item()
        self.weight = place.parameter(*part.shape)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, hidden], a new tensor"""
        gather = gather_rows if on_triton(self.weight) else _embedding
        if self._communicator is None:
            rows = gather(self.weight, input_ids)
        else:
            own = input_ids - self._first_token
            others = (own < 0) | (own >= len(self.weight))
            rows = gather(self.weight, own.masked_fill_(others, 0)).masked_fill_(others.unsqueeze(1), 0.0)
            self._communicator.all_reduce_(rows)
        return rows if self._scale is None else rows.mul_(self._scale)

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield self.part.weight_name, WeightSlot.into(self.weight)


def _embedding(weight: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    return F.embedding(input_ids, weight)


class LMHead(Product):
    """Scores each token of the vocabulary, or of this rank's part of it, [R, hidden] -> [R, vocab]; with its own
    matrix, or with the embedding's where it has no `part`."""

    def __init__(self, part: Part | None, embedding: Embedding | None, place: Place) -> None:
        if part is not None:
            super().__init__(place.parameter(*part.shape))
        else:
            assert embedding is not None
            super().__init__(embedding.weight)
        self.part = part

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        if self.part is not None:
            yield self.part.weight_name, WeightSlot.into(self.weight)


# ----------------------------------------------------------------------------------------------------------- activation
# The gated activations of the feed-forward networks. Imported by gpu.models.


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


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """gpt-oss's (`gpu.checkpoint.architecture.ClampedSwiGLUSpec`): [T, 2 * n], gate first -> [T, n]"""
    return kernels.clamped_swiglu(gate_up, alpha, limit)


# --------------------------------------------------------------------------------------------------------------- packed
# Matrices laid out for the processor once, when the model is loaded, instead of in every product. Imported by layers.
#
# oneDNN computes with weights in tiles of its own. Given a plain matrix it makes them anew for every call, which for
# few rows takes as long as the product: a head of 49,152 x 576 in bfloat16 takes 6.9 ms plain and 4.2 ms packed for one
# row on one core. The results are the same bits.


def pack(weight: torch.Tensor) -> torch.Tensor | None:
    """The packed form of a [out, in] matrix for `packed_linear`, or None where plain ones are as good: packing pays for
    bfloat16 on a CPU that has instructions for it."""
    if (
        weight.device.type != "cpu"
        or weight.dtype != torch.bfloat16
        or not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return None
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return packed


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `torch.nn.functional.linear`: [..., in] -> [..., out]"""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product
