"""An encoder with torch's operations, on a CPU or a CUDA device.

The tokens of all prompts of a step are in one dimension T, without padding. Only attention distinguishes prompts:
prompts of one length are computed together, each attending to itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from gpu.checkpoint import ModelConfig
from gpu.checkpoint.architecture import Part, RMSNormSpec, Rope
from gpu.checkpoint.encoder import (
    EncoderAttentionSpec,
    EncoderLayerSpec,
    EncoderNetworkSpec,
    EncoderSpec,
    LayerNormSpec,
)
from gpu.models.layers import Place, RotaryEmbedding, rotate_
from gpu.runner.encoder_runner import EncoderInputs
from gpu.weights.tensors import as_tensors

_QUERIES_AT_ONCE = 512  # of a layer with a reach, so that its mask stays small

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}


class TorchEncoder:
    """A `gpu.runner.encoder_runner.Encoder` that computes with torch."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, Any]],
        *,
        dtype: torch.dtype,
        device: str,
        max_model_len: int,
    ) -> None:
        """Draw the weights. The longest prompt has `max_model_len` tokens."""
        spec = config.encoder
        assert isinstance(spec, EncoderSpec)
        self._spec, self._dtype, self._device = spec, dtype, torch.device(device)
        self._weights = {name: each.to(self._device, dtype) for name, each in as_tensors(weights)}
        for layer in spec.layers:  # one product computes queries, keys and values
            self._stack(layer.attention.qkv)
        place = Place(dtype, self._device)
        ropes = {layer.attention.rope for layer in spec.layers if layer.attention.rope.dim != 0}
        self._rotaries = {rope: RotaryEmbedding(config.head_dim, max_model_len, rope, place) for rope in ropes}
        self.forms = f"{str(dtype).removeprefix('torch.')} weights (torch)"

    @torch.inference_mode()
    def encode(
        self, inputs: EncoderInputs, cancellation_check: Callable[[], None] | None = None
    ) -> NDArray[np.float32]:
        spec = self._spec
        ids, positions, types = (torch.from_numpy(each).to(self._device) for each in inputs[:3])
        assert spec.embedding is not None
        x = self._weight(spec.embedding)[ids]
        if spec.embedding_scale != 1.0:
            x = x * torch.tensor(spec.embedding_scale, dtype=self._dtype)
        if spec.positions is not None:
            x = x + self._weight(spec.positions)[positions]
        if spec.token_types is not None:
            x = x + self._weight(spec.token_types)[types]
        x = self._norm(spec.embedding_norm, x)
        groups = self._groups(inputs.query_start_loc)
        rotations = {rope: rotary(positions).angles for rope, rotary in self._rotaries.items()}
        for layer in spec.layers:
            assert isinstance(layer, EncoderLayerSpec)
            if cancellation_check is not None:
                cancellation_check()
            y = self._attention(layer.attention, self._norm(layer.attention_norm, x), groups, rotations)
            x = self._norm(layer.attention_sum_norm, x + self._norm(layer.attention_post_norm, y))
            y = self._network(layer.feed_forward, self._norm(layer.feed_forward_norm, x))
            x = self._norm(layer.feed_forward_sum_norm, x + self._norm(layer.feed_forward_post_norm, y))
        return self._norm(spec.norm, x).float().cpu().numpy()

    def _groups(self, query_start_loc: NDArray[np.int32]) -> list[torch.Tensor]:
        """Return the tokens of the prompts of each length, int64 [prompts, length]."""
        starts: dict[int, list[int]] = defaultdict(list)
        for start, length in zip(query_start_loc[:-1].tolist(), np.diff(query_start_loc).tolist(), strict=True):
            starts[length].append(start)
        return [
            (torch.tensor(first)[:, None] + torch.arange(length)).to(self._device) for length, first in starts.items()
        ]

    def _attention(
        self,
        spec: EncoderAttentionSpec,
        x: torch.Tensor,
        groups: list[torch.Tensor],
        rotations: dict[Rope, tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        heads = spec.heads
        qkv = self._linear(spec.qkv[0], x).unflatten(1, (-1, heads.dim))
        qk, rotated = qkv[:, : heads.query + heads.kv], heads.query
        if spec.qk_norm is not None:
            parts = qk.split((rotated, heads.kv), 1)
            qk = torch.cat([self._norm(norm, part) for norm, part in zip(spec.qk_norm, parts, strict=True)], 1)
        if spec.rope in rotations:
            rotate_(qk, *rotations[spec.rope])
        q, k = qk.split((heads.query, heads.kv), 1)
        k, v = (each.repeat_interleave(heads.query // heads.kv, 1) for each in (k, qkv[:, heads.query + heads.kv :]))
        output = torch.empty(len(x), heads.query, heads.dim, dtype=x.dtype, device=x.device)
        for tokens in groups:
            queries, keys, values = (each[tokens].transpose(1, 2) for each in (q, k, v))
            output[tokens] = _attend(queries, keys, values, spec.reach, heads.scale).transpose(1, 2)
        return self._linear(spec.out, output.flatten(1))

    def _network(self, spec: EncoderNetworkSpec, x: torch.Tensor) -> torch.Tensor:
        activation, up = _ACTIVATIONS[spec.activation], self._linear(spec.up, x)
        inner = activation(up) if spec.gate is None else activation(self._linear(spec.gate, x)) * up
        return self._linear(spec.down, inner)

    def _norm(self, spec: RMSNormSpec | None, x: torch.Tensor) -> torch.Tensor:
        if spec is None:
            return x
        weight = self._weight(spec.weight)
        if isinstance(spec, LayerNormSpec):
            return functional.layer_norm(x, x.shape[-1:], weight, self._bias(spec.weight), spec.eps)
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + spec.eps)
        return (x.float() * scale * weight.float()).to(x.dtype)

    def _linear(self, part: Part, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight(part), self._bias(part))

    def _weight(self, part: Part) -> torch.Tensor:
        return self._weights[part.weight_name]

    def _bias(self, part: Part) -> torch.Tensor | None:
        return self._weights[f"{part.name}.bias"] if part.bias else None

    def _stack(self, parts: tuple[Part, ...]) -> None:
        """Stack the rows of these parts under the name of the first."""
        for name in ("weight", "bias")[: 1 + parts[0].bias]:
            stacked = torch.cat([self._weights.pop(f"{part.name}.{name}") for part in parts])
            self._weights[f"{parts[0].name}.{name}"] = stacked


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, reach: int | None, scale: float) -> torch.Tensor:
    """Return the attention of prompts of one length, all [prompts, heads, length, dim]."""
    attend, length = functional.scaled_dot_product_attention, q.shape[2]
    if reach is None or reach >= length - 1:
        return attend(q, k, v, scale=scale)
    outputs = []
    for start in range(0, length, _QUERIES_AT_ONCE):
        stop = min(start + _QUERIES_AT_ONCE, length)
        keys = slice(max(0, start - reach), min(stop + reach, length))
        rows, columns = (torch.arange(each.start, each.stop, device=q.device) for each in (slice(start, stop), keys))
        mask = (rows[:, None] - columns).abs() <= reach
        outputs.append(attend(q[:, :, start:stop], k[:, :, keys], v[:, :, keys], attn_mask=mask, scale=scale))
    return torch.cat(outputs, 2)
