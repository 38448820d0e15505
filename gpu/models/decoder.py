"""The decoder-only transformer, made from the specification of a model (`gpu.checkpoint.architecture`).

The tokens of all requests of a step are in one dimension T; only attention distinguishes requests.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from gpu.attention import AttentionBackend, zeros
from gpu.checkpoint import ModelConfig
from gpu.checkpoint.architecture import AttentionSpec, DecoderSpec, Heads
from gpu.checkpoint.families.table import spec_of
from gpu.checkpoint.tensors import checked
from gpu.kv_cache import kv_layout, widest_heads
from gpu.models.blocks import DecoderLayer, LayerInputs, MoE
from gpu.models.gemma import GEMMA_LAYERS, PerLayerEmbedding, Streams
from gpu.models.layers import Embedding, Linear, LMHead, Place, Product, RMSNorm, RotaryEmbedding, weight_slots
from gpu.sharding import Communicator, vocabulary
from gpu.weights.tensors import QuantizedMatrix

logger = logging.getLogger(__name__)


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
        attentions = [layer.attention for layer in spec.layers]
        ropes = [each.rope if isinstance(each, AttentionSpec) else None for each in attentions]
        kinds = [*dict.fromkeys(rope for rope in ropes if rope is not None)]
        self._rotaries = [RotaryEmbedding(rope.size or config.head_dim, max_model_len, rope, place) for rope in kinds]
        # The rotation of each layer; a layer with a state has no positions, and ignores it.
        self._rotary_of = [0 if rope is None else kinds.index(rope) for rope in ropes]
        self.rotary, *others = self._rotaries
        self._others = nn.ModuleList(others)
        layers = [GEMMA_LAYERS.get(type(layer), DecoderLayer)(layer, attention, place) for layer in spec.layers]
        self.layers = nn.ModuleList(layers)
        self.per_layer = None if spec.per_layer is None else PerLayerEmbedding(spec.per_layer, place)
        self.streams = None if spec.streams is None else Streams(spec.streams, place)
        self._mixtures = [module for module in self.layers.modules() if isinstance(module, MoE)]
        counts = [mixture.num_tokens for mixture in self._mixtures]  # all layers have equally many experts
        self.tokens_of_experts = torch.stack(counts) if counts else torch.zeros(0, 0, device=device)
        for mixture, row in zip(self._mixtures, self.tokens_of_experts, strict=True):
            mixture.num_tokens = row
        self._backend = attention(widest_heads(spec))
        self._layout = kv_layout(config, spec)
        heads = {(each.heads.kv, each.heads.dim) for each in attentions if isinstance(each, AttentionSpec)}
        self._has_equal_heads = len(heads) == 1
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
        embedded = residual
        rotations = [rotary(positions) for rotary in self._rotaries]
        delta = None
        if self.streams is not None:
            residual = self.streams.split(embedded)
        vectors: Sequence[torch.Tensor | None] = [None] * len(self.layers)
        if self.per_layer is not None:
            vectors = self.per_layer(input_ids, embedded)
        caches, groups = self._caches(kv_caches), self._layout.groups
        for layer, rotary, group, kv_cache, vector in zip(
            self.layers, self._rotary_of, groups, caches, vectors, strict=True
        ):
            if cancellation_check is not None:
                cancellation_check()
            delta = layer(residual, delta, LayerInputs(rotations[rotary], metadata[group], kv_cache, vector))
        if self._mixtures:
            self._count_experts(metadata[0].slot_mapping)
        if self.streams is not None:
            residual = self.streams.join(residual)
        if self.norm is None:
            return residual if delta is None else residual.add_(delta)
        return self.norm(residual, delta)

    def _caches(self, kv_caches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the cache of each layer: that of its slot, or a part of the numbers of each token in it."""
        caches, parts = [kv_caches[slot] for slot in self._layout.slots], self._layout.parts
        if self._has_equal_heads:
            return caches
        shapes = [(2, layer.attention.heads.kv, layer.attention.heads.dim) for layer in self.spec.layers]
        sizes = map(math.prod, shapes)
        return [
            cache.flatten(2)[..., part * size : (part + 1) * size].unflatten(-1, shape)
            for cache, part, size, shape in zip(caches, parts, sizes, shapes, strict=True)
        ]

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
        return [self._backend.allocate_kv_cache(num_blocks, dtype, device) for _ in range(self._layout.num_slots)]

    def allocate_states(self, num_slots: int, device: torch.device) -> torch.Tensor:
        """Return zeroed states, float32 [slots, layers, numbers]. `forward` takes each layer's after the caches."""
        state_layers = self.spec.state_layers
        size = state_layers[0].state_size if state_layers else 0
        return zeros((num_slots, len(state_layers), size), torch.float32, device)

    def set_max_model_len(self, max_model_len: int) -> None:
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
