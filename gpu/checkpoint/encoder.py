"""The parts of an encoder: a transformer in which each token sees the tokens before it and after it.

The records extend those of decoders (`gpu.checkpoint.architecture`), so that files are read, checked and quantized
alike. `gpu.runner.encoder_runner` pools the hidden states and applies the heads; everything else is computed by
`gpu.models.encoder` or `gpu.cpu.encoder`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gpu.checkpoint.architecture import AttentionSpec, DecoderSpec, LayerSpec, Part, RMSNormSpec


@dataclass(frozen=True)
class LayerNormSpec(RMSNormSpec):
    """Normalization to mean 0 and variance 1 (Ba et al., arXiv:1607.06450), times a weight, plus its bias if it has
    one."""


@dataclass(frozen=True, kw_only=True)
class EncoderAttentionSpec(AttentionSpec):
    """Attention to the tokens of a request that are at most `reach` positions away on both sides; None: to all. A
    `rope` of dimension 0 rotates nothing."""

    reach: int | None = None
    has_kernel: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class EncoderNetworkSpec:
    """The network down(activation(up(x))), or with a gate down(activation(gate(x)) * up(x))."""

    up: Part
    down: Part
    activation: str  # "gelu" (by the error function), "gelu_tanh", "relu", "silu"
    gate: Part | None = None


@dataclass(frozen=True, kw_only=True)
class EncoderLayerSpec(LayerSpec):
    """A layer as `LayerSpec` has it, and norms of the residual stream after each addition, as in BERT."""

    feed_forward: Any  # an EncoderNetworkSpec
    attention_sum_norm: RMSNormSpec | None = None
    feed_forward_sum_norm: RMSNormSpec | None = None


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """A layer of a head: activation(weight x + bias), then a norm."""

    weight: Part
    activation: str  # as in `EncoderNetworkSpec`, or "tanh", "sigmoid", "identity"
    norm: RMSNormSpec | None = None


@dataclass(frozen=True, kw_only=True)
class EncoderSpec(DecoderSpec):
    """An encoder. Its first hidden state is norm(scale * embedding + position + token type).

    Heads are applied after pooling: `dense` to vectors of embeddings, `classifier`, which pools by `classifier_pooling`
    and returns a logit for each label, and `token_dense` to every token (ColBERT).
    """

    positions: Part | None = None  # [positions, hidden]; None: positions only rotate
    first_position: int = 0  # the row of the first token's position
    padding: int | None = None  # tokens with this id have the row before the first, and are not counted (RoBERTa)
    token_types: Part | None = None  # [types, hidden]
    embedding_norm: RMSNormSpec | None = None
    dense: tuple[DenseSpec, ...] = ()
    classifier: tuple[DenseSpec, ...] = ()
    classifier_pooling: str = "cls"
    token_dense: tuple[DenseSpec, ...] = ()

    @property
    def heads(self) -> tuple[DenseSpec, ...]:
        """The layers that are applied after pooling, or to every token."""
        return (*self.dense, *self.classifier, *self.token_dense)
