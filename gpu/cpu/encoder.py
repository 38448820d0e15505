"""Encoders, computed by the C++ library as decoders are: a layer differs by its data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.checkpoint import ModelConfig, RopeScaling
from gpu.checkpoint.architecture import HeadOrder, Heads, Part, RMSNormSpec, Rope, Stack, records_of
from gpu.checkpoint.encoder import (
    EncoderAttentionSpec,
    EncoderLayerSpec,
    EncoderNetworkSpec,
    EncoderSpec,
    LayerNormSpec,
)
from gpu.checkpoint.families.table import spec_of
from gpu.checkpoint.tensors import Weight
from gpu.cpu.decoder import ACTIVATIONS, MAX_GROUP, TILE, CPUCausalLM
from gpu.cpu.library import Library
from gpu.cpu.weights import LANES, zeros
from gpu.runner.encoder_runner import EncoderInputs
from gpu.runner.runner import ModelInputs

_TOKENS_AT_ONCE = 1024  # enough for full speed, and few enough that their activations stay in the processor's cache

_KINDS = {EncoderSpec, EncoderLayerSpec, EncoderAttentionSpec, EncoderNetworkSpec, RMSNormSpec, LayerNormSpec}
_KINDS |= {Heads, Rope, RopeScaling, Part, Stack, HeadOrder}


class CPUEncoder(CPUCausalLM):
    """A `gpu.runner.encoder_runner.Encoder`. Requests are whole, so keys and values live only within a layer: all
    layers use one KV cache, which each pass overwrites."""

    def __init__(
        self,
        library: Library,
        config: ModelConfig,
        weights: Iterable[tuple[str, Weight]],
        *,
        num_threads: int,
        quantized: bool,
        max_model_len: int,
        max_num_batched_tokens: int,
    ) -> None:
        spec = _without_heads(config)
        super().__init__(
            library,
            config,
            weights,
            spec=spec,
            block_size=TILE,
            max_model_len=max_model_len,
            num_threads=num_threads,
            quantized=quantized,
        )
        self._positions = 0 if spec.positions is None else spec.positions.shape[0]
        self._num_blocks = 0
        self._reserve(min(_TOKENS_AT_ONCE, max_num_batched_tokens) // TILE)

    @staticmethod
    def supports(config: ModelConfig) -> bool:
        """Return True if the library supports every part of this encoder in its size."""
        spec = _without_heads(config)
        records = list(records_of(spec))
        if not {type(record) for record in records} <= _KINDS:
            return False
        norms = [record for record in records if isinstance(record, RMSNormSpec)]
        networks: list[Any] = [
            layer.feed_forward for layer in spec.layers
        ]  # EncoderNetworkSpec, as EncoderLayerSpec says
        heads, one = spec.layers[0].attention.heads, networks[0]
        merged = [layer.attention.qkv for layer in spec.layers]
        return (
            heads.dim % 16 == 0
            and heads.query // heads.kv <= MAX_GROUP
            and all(size % LANES == 0 for size in (config.hidden_size, one.up.shape[0]))
            and len({layer.attention.heads for layer in spec.layers}) == 1
            and len({(type(norm), norm.eps) for norm in norms}) == 1
            and not (isinstance(norms[0], LayerNormSpec) and any(layer.attention.qk_norm for layer in spec.layers))
            and len({layer.attention_post_norm is None for layer in spec.layers}) == 1
            and len({layer.feed_forward_post_norm is None for layer in spec.layers}) == 1
            and len({(network.activation, network.gate is None) for network in networks}) == 1
            and (one.activation, one.gate is not None) in ACTIVATIONS
            and not (one.gate is not None and any(part.bias for part in (one.gate, one.up)))
            and all(len({part.bias for part in parts}) == 1 for parts in merged)
        )

    def encode(
        self, inputs: EncoderInputs, cancellation_check: Callable[[], None] | None = None
    ) -> NDArray[np.float32]:
        """Return the last hidden states, [T, hidden]."""
        hidden = np.empty((len(inputs.input_ids), self.config.hidden_size), dtype=np.float32)
        starts = inputs.query_start_loc
        first = 0
        while first + 1 < len(starts):
            end = max(first + 1, int(np.searchsorted(starts, starts[first] + _TOKENS_AT_ONCE, side="right")) - 1)
            tokens = slice(int(starts[first]), int(starts[end]))
            hidden[tokens] = self._encode(inputs, tokens, starts[first : end + 1] - starts[first], cancellation_check)
            first = end
        return hidden

    def _encode(
        self,
        inputs: EncoderInputs,
        tokens: slice,
        starts: NDArray[np.int32],
        cancellation_check: Callable[[], None] | None,
    ) -> NDArray[np.float32]:
        """Encode some requests. Each has blocks of its own."""
        lengths = np.diff(starts)
        ends = np.cumsum(-(-lengths // TILE), dtype=np.int32)
        self._reserve(int(ends[-1]))
        tables = (ends - -(-lengths // TILE))[:, None] + np.arange(-(-lengths.max() // TILE), dtype=np.int32)
        added = inputs.positions[tokens] if self._positions else 0
        return self.forward(
            ModelInputs(
                input_ids=inputs.input_ids[tokens],
                positions=np.arange(starts[-1]) - np.repeat(starts[:-1], lengths),
                query_start_loc=starts,
                seq_lens=lengths,
                block_tables=np.ascontiguousarray(tables, dtype=np.int32)[None],
                num_decodes=0,
                num_prompt_tokens=lengths,
            ),
            cancellation_check,
            added=inputs.types[tokens] * max(self._positions, 1) + added if self._model.added else None,
        )

    def _reserve(self, num_blocks: int) -> None:
        """Make the KV cache at least this large."""
        if num_blocks > self._num_blocks:
            heads = self._layers[0].heads
            self._cache = zeros(4 * num_blocks * heads.kv * heads.dim * TILE)
            self._num_blocks = num_blocks
            for layer in self._layers:
                layer.kv_cache = self._cache.ctypes.data


def _without_heads(config: ModelConfig) -> EncoderSpec:
    """Return the encoder's spec without the layers that follow pooling."""
    spec = spec_of(config)
    assert isinstance(spec, EncoderSpec)
    return replace(spec, dense=(), classifier=(), token_dense=())
