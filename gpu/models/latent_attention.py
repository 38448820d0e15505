"""Multi-head latent attention: a cache of one latent for each token, whatever the number of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from gpu.attention import AttentionBackend, AttentionMetadata, TritonAttention
from gpu.checkpoint.architecture import Heads, LatentAttentionSpec
from gpu.models import layers


class LatentAttention(nn.Module):
    """The layer of a `LatentAttentionSpec`, always in the form with one key for all heads.

    With keys and values of each head, attention of a chunk of 512 tokens took 0.5 to 0.6 of the time in V2-Lite's shape
    (one core). That would be a second path, for prompts alone.
    """

    def __init__(
        self, spec: LatentAttentionSpec, backend: Callable[[Heads], AttentionBackend], place: layers.Place
    ) -> None:
        super().__init__()
        self.spec = spec
        self.backend = backend(spec.heads)
        query, latent, expand = spec.qkv
        self.query_norm = self.query = None
        if spec.query_latent is not None:
            self.query, self.query_norm = layers.Linear(query, place=place), layers.RMSNorm(spec.query_latent[1], place)
            query = spec.query_latent[0]
        self.projections = layers.Linear(query, latent, place=place)
        self.latent_norm = layers.RMSNorm(spec.latent_norm, place)
        self.expand = place.parameter(*expand.shape)
        self.out = layers.RowLinear(spec.out, place)

    def forward(
        self, hidden: torch.Tensor, rotation: layers.Rotation, metadata: AttentionMetadata, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        assert not isinstance(self.backend, TritonAttention)
        heads, size = self.spec.heads, self.spec.latent_norm.weight.shape[0]
        values, rotating = self.spec.out.shape[1] // heads.query, heads.dim - size
        projected = self.projections(hidden)
        query, latent, key = projected.split((projected.shape[1] - heads.dim, size, rotating), 1)
        if self.query is not None and self.query_norm is not None:
            query = self.query(self.query_norm(query))
        query = query.unflatten(1, (heads.query, -1))
        rotated = torch.cat((query[..., -rotating:], key.unsqueeze(1)), 1)
        if self.spec.interleaved:  # queries and keys are reordered alike, so that no score changes
            rotated = rotated.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2)
        layers.rotate_(rotated, *rotation.angles)
        to_keys, to_values = self.expand.unflatten(0, (heads.query, -1)).tensor_split((-values,), 1)
        plain = (query[..., :-rotating].transpose(0, 1) @ to_keys).transpose(0, 1)  # [T, heads, size]
        keys = torch.cat((self.latent_norm(latent).unsqueeze(1), rotated[:, -1:]), 2)
        queries = torch.cat((plain, rotated[:, :-1]), 2)
        attended = self.backend.forward(queries, keys, None, kv_cache, metadata)  # [T, heads, size]
        output = attended.transpose(0, 1) @ to_values.transpose(1, 2)
        return self.out(output.transpose(0, 1).flatten(1))

    def weight_slots(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield self.spec.qkv[2].weight_name, self.expand
