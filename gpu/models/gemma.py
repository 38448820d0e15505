"""The layers of Gemma 3n and 4, and their per-layer embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from gpu.attention import AttentionBackend
from gpu.checkpoint.architecture import Heads
from gpu.checkpoint.gemma_layers import (
    AltUpLayerSpec,
    GemmaLayerSpec,
    ParallelExpertsSpec,
    PerLayerEmbeddingSpec,
    StreamsSpec,
)
from gpu.kernels import combine, group_rows, route
from gpu.models import layers
from gpu.models.blocks import DecoderLayer, LayerInputs, MoE, normed


class PerLayerEmbedding(nn.Module):
    """A vector of each token for each layer."""

    def __init__(self, spec: PerLayerEmbeddingSpec, place: layers.Place) -> None:
        super().__init__()
        self.norm = layers.RMSNorm(spec.norm, place)
        scale = torch.tensor(self.norm.shape[0] ** 0.5, dtype=place.dtype).item()
        self.embedding = layers.Embedding(spec.embedding, scale, place)
        self.projection = layers.Linear(spec.projection, place=place)

    def forward(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return [T, size] for each layer. `input_ids` is int64 [T], `embedded` their usual embedding, [T, hidden]."""
        own = self.embedding(input_ids.where(input_ids < len(self.embedding.weight), 0)).unflatten(
            1, (-1, *self.norm.shape)
        )
        projected = self.projection(embedded).mul_(embedded.shape[1] ** -0.5).view_as(own)
        return self.norm(projected).add_(own).mul_(2**-0.5).unbind(1)


class GemmaLayer(DecoderLayer):
    """A layer of a `GemmaLayerSpec`."""

    def __init__(
        self, spec: GemmaLayerSpec, attention: Callable[[Heads], AttentionBackend], place: layers.Place
    ) -> None:
        super().__init__(spec, attention, place)
        self.spec = spec
        self.experts = None if spec.experts is None else ParallelExperts(spec.experts, place)
        self.scalar = None if spec.scalar is None else place.parameter(1)
        if spec.per_layer_input is not None:
            self.gate = layers.Linear(spec.per_layer_input.gate, place=place)
            self.projection = layers.Linear(spec.per_layer_input.projection, place=place)
            self.norm = layers.RMSNorm(spec.per_layer_input.norm, place)

    def forward(self, residual: torch.Tensor, delta: torch.Tensor | None, given: LayerInputs) -> None:
        """Compute the layer on `residual` [T, hidden] in place."""
        delta = super().forward(residual, delta, given)
        assert delta is not None
        residual.add_(delta)
        if given.vectors is not None:
            residual.add_(self.of_vectors(residual, given.vectors))
        if self.scalar is not None:
            residual.mul_(self.scalar)

    def of_vectors(self, hidden: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """[T, hidden] and [T, size] -> [T, hidden], see `PerLayerInputSpec`"""
        return self.norm(self.projection(F.gelu(self.gate(hidden), approximate="tanh").mul_(vectors)))

    def network(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        output = self.feed_forward(hidden)
        return output if self.experts is None else self.experts(residual).add_(self.experts.dense_post_norm(output))

    def weight_slots(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.scalar is not None and self.spec.scalar is not None:
            yield self.spec.scalar.weight_name, self.scalar


class AltUpLayer(GemmaLayer):
    """A layer of an `AltUpLayerSpec`."""

    spec: AltUpLayerSpec

    def __init__(
        self, spec: AltUpLayerSpec, attention: Callable[[Heads], AttentionBackend], place: layers.Place
    ) -> None:
        super().__init__(spec, attention, place)
        matrices = (spec.router, spec.prediction, spec.correction, spec.left, spec.right)
        self.router, self.prediction, self.correction, self.left, self.right = (
            layers.Linear(matrix, place=place) for matrix in matrices
        )
        self.router_norm, self.residual_norm = (
            layers.RMSNorm(norm, place) for norm in (spec.router_norm, spec.residual_norm)
        )
        self.scale = place.parameter(*spec.scale.shape)

    def forward(self, residual: torch.Tensor, delta: torch.Tensor | None, given: LayerInputs) -> None:
        """Compute the layer on the streams, `residual` [n, T, hidden], in place."""
        assert given.vectors is not None
        count, active = len(residual), self.spec.active
        factors = self.prediction(self._modalities(residual[active])).unflatten(1, (count, count))
        residual.add_(torch.einsum("tij,jth->ith", factors, residual))
        inner = residual[active].clone()
        hidden = normed(self.attention_norm, inner)
        low_rank = hidden + self.residual_norm(self.right(self.left(hidden)))
        inner.add_(self.attend(hidden, given)).add_(low_rank).mul_(2**-0.5)
        inner.add_(self.feed(inner, None))
        factors = self.correction(self._modalities(inner)).add_(1.0)
        residual.add_((inner - residual[active]) * factors.t().unsqueeze(2))
        first = residual[active] * self.scale if self.spec.is_scaled else residual[active]
        residual[1:] += self.of_vectors(first, given.vectors)

    def _modalities(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, n]"""
        return self.router(self.router_norm(hidden).mul_(1 / hidden.shape[1])).tanh_()

    def weight_slots(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield self.spec.scale.weight_name, self.scale


GEMMA_LAYERS: dict[type, Callable[..., DecoderLayer]] = {GemmaLayerSpec: GemmaLayer, AltUpLayerSpec: AltUpLayer}


class Streams(nn.Module):
    """The beginning and the end of Gemma 3n's residual streams."""

    def __init__(self, spec: StreamsSpec, place: layers.Place) -> None:
        super().__init__()
        self.projections, self.back = (
            nn.ModuleList(layers.Linear(part, place=place) for part in parts) for parts in (spec.projections, spec.back)
        )

    def split(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return all streams, [n, T, hidden], for the embedded tokens, [T, hidden]."""
        return torch.stack([embedded, *(_as_large(project(embedded), embedded) for project in self.projections)])

    def join(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the mean of all streams, each scaled as the first: [n, T, hidden] -> [T, hidden]."""
        first, others = streams[0], zip(self.back, streams[1:], strict=True)
        return torch.stack([first, *(_as_large(project(stream), first) for project, stream in others)]).mean(0)


def _as_large(hidden: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return `hidden` with the root mean square of `other`, row by row."""
    squares, wanted = (each.square().mean(-1, keepdim=True) for each in (hidden, other))
    return hidden * wanted.sqrt() / squares.clamp(min=1e-5).sqrt()


class ParallelExperts(MoE):
    """The experts of a `ParallelExpertsSpec`."""

    def __init__(self, spec: ParallelExpertsSpec, place: layers.Place) -> None:
        super().__init__(spec.experts, place)
        self.parts = spec.scale, spec.expert_scale
        self.scale, self.expert_scale = (place.parameter(*part.shape) for part in self.parts)
        self.norm, self.post_norm = layers.RMSNorm(spec.norm, place), layers.RMSNorm(spec.post_norm, place)
        self.dense_post_norm = layers.RMSNorm(spec.dense_post_norm, place)

    def forward(self, residual: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        size = residual.shape[1:]
        hidden = F.rms_norm(residual, size, None, self.norm.eps).mul_(self.scale).mul_(size[0] ** -0.5)
        shares, self.chosen = route(self.router(hidden), self.spec.top_k, self.spec.normalized)
        shares = shares * self.expert_scale[self.chosen].float()
        groups = group_rows(self.chosen, len(self.spec.experts))
        return self.post_norm(combine(self._experts(self.norm(residual), groups), shares))

    def weight_slots(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().weight_slots()
        for part, weight in zip(self.parts, (self.scale, self.expert_scale), strict=True):
            yield part.weight_name, weight
