"""An encoder with torch's operations, on a CPU or a CUDA device.

The tokens of all prompts of a step are in one dimension T, without padding. Only attention (`gpu.kernels.whole`)
distinguishes prompts.
"""

from __future__ import annotations

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
from gpu.kernels.whole import WholePrompts, whole_attention, whole_prompts
from gpu.models.layers import Place, RotaryEmbedding, rotate_
from gpu.runner.encoder_runner import EncoderInputs
from gpu.weights.tensors import as_tensors

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
        first = spec.layers[0].attention
        assert isinstance(first, EncoderAttentionSpec)
        prompts = whole_prompts(inputs.query_start_loc, x, first.heads)
        rotations = {rope: rotary(positions).angles for rope, rotary in self._rotaries.items()}
        for layer in spec.layers:
            assert isinstance(layer, EncoderLayerSpec)
            if cancellation_check is not None:
                cancellation_check()
            y = self._attention(layer.attention, self._norm(layer.attention_norm, x), prompts, rotations)
            x = self._norm(layer.attention_sum_norm, x + self._norm(layer.attention_post_norm, y))
            y = self._network(layer.feed_forward, self._norm(layer.feed_forward_norm, x))
            x = self._norm(layer.feed_forward_sum_norm, x + self._norm(layer.feed_forward_post_norm, y))
        return self._norm(spec.norm, x).float().cpu().numpy()

    def _attention(
        self,
        spec: EncoderAttentionSpec,
        x: torch.Tensor,
        prompts: WholePrompts,
        rotations: dict[Rope, tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        heads = spec.heads
        qkv = self._linear(spec.qkv[0], x).unflatten(1, (-1, heads.dim))
        queries, keys, _ = qkv.split((heads.query, heads.kv, heads.kv), 1)
        if spec.qk_norm is not None:
            for norm, part in zip(spec.qk_norm, (queries, keys), strict=True):
                part.copy_(self._norm(norm, part))
        if spec.rope in rotations:
            rotate_(qkv[:, : heads.query + heads.kv], *rotations[spec.rope])
        return self._linear(spec.out, whole_attention(qkv, heads, prompts, spec.reach).flatten(1))

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
