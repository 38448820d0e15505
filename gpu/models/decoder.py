"""The decoder-only transformer, made from the specification of a model (`gpu.checkpoint.architecture`).

The tokens of all requests of a step are in one dimension T; only attention distinguishes requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import nn

from gpu.attention import AttentionBackend, zeros
from gpu.checkpoint import ModelConfig, ModelError
from gpu.checkpoint.architecture import AttentionSpec, DecoderSpec, Heads, LayerSpec
from gpu.checkpoint.families.table import spec_of
from gpu.checkpoint.tensors import checked
from gpu.kv_cache import kv_layout
from gpu.models.blocks import ATTENTION, FEED_FORWARD, MoE
from gpu.models.layers import (
    Embedding,
    Linear,
    LMHead,
    Place,
    Product,
    RMSNorm,
    RotaryEmbedding,
    Rotation,
    weight_slots,
)
from gpu.models.state_layers import StateLayer
from gpu.sharding import Communicator, vocabulary
from gpu.weights.tensors import QuantizedMatrix

logger = logging.getLogger(__name__)

T = TypeVar("T")


class CausalLM(nn.Module):
    """A decoder and its language-model head, with uninitialized weights. Call under `torch.inference_mode()`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        max_model_len: int,
        attention: Callable[[Heads], AttentionBackend],
        spec: DecoderSpec | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        """`max_model_len` is the longest served context, in tokens. `attention` makes a backend; layers of equal heads
        share one. On the meta device nothing is allocated. `spec` is a rank's part of the model, with partial sums
        (`gpu.sharding`); the tensor ranks of its stage need a `communicator`, and make every call together.

        Raises ModelError for an architecture, a kind of layer or a rope scaling that is not implemented.
        """
        super().__init__()
        self.config = config
        self.spec = spec = spec or spec_of(config)
        attention, place = cache(attention), Place(dtype, device, communicator, spec.keeps_packed)
        self.embed_tokens: Embedding | None = None
        if spec.embedding is not None:
            scale = spec.embedding_scale
            scale = torch.tensor(scale, dtype=dtype).item() if spec.rounds_scale else scale
            self.embed_tokens = Embedding(spec.embedding, scale, place)
        ropes = [layer.attention.rope for layer in spec.layers if isinstance(layer.attention, AttentionSpec)]
        rotaries = {
            rope: RotaryEmbedding(rope.size or config.head_dim, max_model_len, rope, place)
            for rope in dict.fromkeys(ropes)
        }
        self._rotaries = [*rotaries.values()]  # in the order of their first use
        # The rotation of each layer; a layer with a state has no positions, and ignores it.
        self._rotary_of = [
            list(rotaries).index(layer.attention.rope) if isinstance(layer.attention, AttentionSpec) else 0
            for layer in spec.layers
        ]
        self.rotary, *others = self._rotaries
        self._others = nn.ModuleList(others)
        layers = [DecoderLayer(layer, attention, place) for layer in spec.layers]
        self.layers = nn.ModuleList(layers)
        self._mixtures = [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, MoE)]
        counts = [mixture.num_tokens for mixture in self._mixtures]  # all layers have equally many experts
        self.tokens_of_experts = torch.stack(counts) if counts else torch.zeros(0, 0, device=device)
        for mixture, row in zip(self._mixtures, self.tokens_of_experts, strict=True):
            mixture.num_tokens = row
        attentions = [layer.attention for layer in layers]
        self._backends = [each.backend for each in attentions if not isinstance(each, StateLayer)]
        self._layout = kv_layout(config, spec)
        self.norm = None if spec.norm is None else RMSNorm(spec.norm, place)
        self._softcap = spec.softcap
        self.communicator = communicator
        self.lm_head: LMHead | None = None
        if self.norm is not None:
            self.lm_head = LMHead(spec.head, self.embed_tokens, place)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: Sequence[Any],
        kv_caches: Sequence[torch.Tensor],
        cancellation_check: Callable[[], None] | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step: int64 [T] token ids and their positions -> final-normed hidden states [T, hidden].

        A pipeline stage starts from the `residual` stream [T, hidden] of the stage before, which it overwrites; if it
        is not the last, it returns its own. The keys and values of the T tokens are written to `kv_caches`, one for
        each slot of `gpu.kv_cache`, at the positions in the metadata of the layer's group; the last is for layers with
        states (`StateMetadata`). `cancellation_check` is called before each layer, and may raise to end the pass.
        """
        if residual is None:
            assert self.embed_tokens is not None
            residual = self.embed_tokens(input_ids)
        rotations = [rotary(positions) for rotary in self._rotaries]
        delta = None
        layout = self._layout
        for layer, rotary, group, slot in zip(self.layers, self._rotary_of, layout.groups, layout.slots, strict=True):
            if cancellation_check is not None:
                cancellation_check()
            delta = layer(residual, delta, rotations[rotary], metadata[group], kv_caches[slot])
        if self._mixtures:
            self._count_experts(metadata[0].slot_mapping)
        if self.norm is None:
            return residual if delta is None else residual.add_(delta)
        return self.norm(residual, delta)

    def _count_experts(self, slot_mapping: torch.Tensor) -> None:
        """Count the tokens of experts for all layers at once, with a few kernels per step. Padding is not counted."""
        layers = [mixture.chosen for mixture in self._mixtures if mixture.chosen is not None]
        if not layers:
            return
        chosen = torch.stack(layers).flatten(1)
        is_token = (slot_mapping >= 0).long().repeat_interleave(chosen.shape[1] // len(slot_mapping))
        self.tokens_of_experts.scatter_add_(1, chosen, is_token.expand_as(chosen))

    def allocate_kv_cache(self, num_blocks: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        """Return the zeroed cache of every slot (`gpu.kv_cache`), in the layout of the attention backend."""
        backends = self._backends[: self._layout.num_slots]
        return [backend.allocate_kv_cache(num_blocks, dtype, device) for backend in backends]

    def allocate_states(self, num_slots: int, device: torch.device) -> torch.Tensor:
        """Return zeroed states, float32 [slots, layers, numbers]. `forward` takes each layer's after the caches."""
        state_layers = self.spec.state_layers
        size = state_layers[0].state_size if state_layers else 0
        return zeros((num_slots, len(state_layers), size), torch.float32, device)

    def set_max_model_len(self, max_model_len: int) -> None:
        """Set the longest served context, in tokens."""
        for rotary in self._rotaries:
            rotary.resize(max_model_len)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, vocab]. Pass only rows that sample: this is the largest matrix of the model."""
        logits = self.own_logits(hidden)
        if self.communicator is None:
            return logits
        ranges = vocabulary(self.config.vocab_size, self.communicator.size)
        return self.communicator.all_gather(logits, [stop - start for start, stop in ranges])

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, tokens of this rank]"""
        assert self.lm_head is not None
        logits: torch.Tensor = self.lm_head(hidden)
        if self.spec.logits_scale != 1.0:
            logits.mul_(self.spec.logits_scale)
        return logits if self._softcap is None else logits.div_(self._softcap).tanh_().mul_(self._softcap)

    @torch.inference_mode()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor | QuantizedMatrix]]) -> None:
        """Copy and convert tensors with their Hugging Face names, one at a time, so that memory needs to hold only one
        besides the model. Raises ModelError for missing and for unknown tensors."""
        slots = weight_slots(self)
        linears = [layer for layer in self.modules() if isinstance(layer, Linear) and self.spec.keeps_packed]
        holders = {part.weight_name: layer for layer in linears for part in layer.parts}
        for name, tensor in checked(weights, self.config, source="The checkpoint", spec=self.spec):
            if name in holders:
                holders[name].hold(name, tensor)
            else:
                assert isinstance(tensor, torch.Tensor)
                slots[name].copy_(tensor)
        for layer in self.modules():
            if isinstance(layer, Product):
                layer.pack()
        if linears:
            message = "%d of %d linear layers are computed with as they are stored; the others have the model's dtype"
            logger.info(message, sum(layer.is_quantized for layer in linears), len(linears))


class DecoderLayer(nn.Module):
    """Attention and feed-forward network, with their norms."""

    def __init__(self, spec: LayerSpec, attention: Callable[[Heads], AttentionBackend], place: Place) -> None:
        super().__init__()
        mixer, network = _implemented(ATTENTION, spec.attention), _implemented(FEED_FORWARD, spec.feed_forward)
        self.attention = mixer(spec.attention, attention, place)
        self.feed_forward = network(spec.feed_forward, place)
        norms = (spec.attention_norm, spec.attention_post_norm, spec.feed_forward_norm, spec.feed_forward_post_norm)
        self.attention_norm, self.attention_post_norm, self.feed_forward_norm, self.feed_forward_post_norm = (
            None if norm is None else RMSNorm(norm, place) for norm in norms
        )

    def forward(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        rotation: Rotation,
        metadata: Any,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Add `delta`, the output of the layer before, to `residual` [T, hidden] in place. The output of this layer is
        returned instead of added, so that the next norm adds and normalizes in one pass."""
        hidden = _added(residual, delta) if self.attention_norm is None else self.attention_norm(residual, delta)
        delta = self.attention(hidden, rotation, metadata, kv_cache)
        if self.attention_post_norm is not None:
            delta = self.attention_post_norm(delta)
        norm = self.feed_forward_norm
        delta = self.feed_forward(_added(residual, delta) if norm is None else norm(residual, delta))
        return delta if self.feed_forward_post_norm is None else self.feed_forward_post_norm(delta)


def _added(residual: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
    return residual if delta is None else residual.add_(delta)


def _implemented(kinds: Mapping[type, T], spec: object) -> T:
    if type(spec) not in kinds:
        known = ", ".join(kind.__name__ for kind in kinds)
        raise ModelError(f"A layer of the kind {type(spec).__name__} is not implemented; there are {known}.")
    return kinds[type(spec)]
