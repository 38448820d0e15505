"""The parts of Gemma 3n and 4 that other families do not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gpu.checkpoint.architecture import AttentionSpec, GeGLUSpec, LayerSpec, MoESpec, Part, RMSNormSpec


@dataclass(frozen=True)
class NormedAttentionSpec(AttentionSpec):
    """Attention of Gemma 3n and 4: values pass a norm without weights. Where values are the keys before their norm and
    rotation, `qkv` has two parts. Where a layer reads the keys and values of another (`ModelConfig.source`), `qkv` and
    `qk_norm` have those of queries only."""

    has_kernel: ClassVar[bool] = False


@dataclass(frozen=True)
class SparseGeGLUSpec(GeGLUSpec):
    """GeGLU with relu(g - mean(g) - `deviations` std(g)) for each token's g = gate(x): only the largest remain."""

    deviations: float


@dataclass(frozen=True)
class ParallelExpertsSpec:
    """The experts of Gemma 4, which compute on the same residual stream x as the layer's dense network. The router
    reads rms_norm(x) * `scale` / sqrt(hidden size). An expert's share is multiplied by its number in `expert_scale`."""

    experts: MoESpec
    scale: Part  # [hidden]
    expert_scale: Part  # [experts]
    norm: RMSNormSpec
    post_norm: RMSNormSpec
    dense_post_norm: RMSNormSpec  # of the dense network's output, before that of the experts is added


@dataclass(frozen=True)
class PerLayerInputSpec:
    """norm(projection(gelu(gate(x)) * v)), added to the residual stream x; v is the token's vector for the layer."""

    gate: Part
    projection: Part
    norm: RMSNormSpec


@dataclass(frozen=True)
class GemmaLayerSpec(LayerSpec):
    """A layer of Gemma 4, with experts parallel to its network. In the end, the residual stream times `scalar` [1]."""

    experts: ParallelExpertsSpec | None = None
    per_layer_input: PerLayerInputSpec | None = None
    scalar: Part | None = None


@dataclass(frozen=True, kw_only=True)
class AltUpLayerSpec(GemmaLayerSpec):
    """A layer of Gemma 3n, on n residual streams s (alternating updates: Baykal et al., arXiv:2301.13310).

    Stream i becomes p_i = s_i + sum of P_ij s_j. Attention and network compute y from x = p_active, and p_i + c_i (y -
    p_active) is the new stream, with c = 1 + correction(m(y)) and P = prediction(m(s_active)), where m(z) =
    tanh(router(router_norm(z) / hidden size)). Attention's output is added to l = h + norm(right(left(h))) of its input
    h and to x, and the sum is divided by sqrt(2) (learned augmented residual layer, arXiv:2411.07501). The vector of
    the layer is added to all streams except the first, computed from the active one times `scale`.
    """

    active: int
    router: Part  # [n, hidden]
    router_norm: RMSNormSpec
    prediction: Part  # [n * n, n]
    correction: Part  # [n, n]
    scale: Part  # [hidden]
    is_scaled: bool  # False: `scale` is in the files and not used
    left: Part  # [rank, hidden]
    right: Part  # [hidden, rank]
    residual_norm: RMSNormSpec


@dataclass(frozen=True)
class StreamsSpec:
    """The n residual streams of Gemma 3n: projections of the embedding, and averaged, projected back, in the end. All
    projections get the root mean square of stream 0, which is not projected."""

    projections: tuple[Part, ...]  # of streams 1 to n - 1, [hidden, hidden]
    back: tuple[Part, ...]


@dataclass(frozen=True)
class PerLayerEmbeddingSpec:
    """A vector of each token for each layer: (norm(projection(e) / sqrt(hidden size)) + row * sqrt(size)) / sqrt(2),
    with the token's row of `embedding`, and of the usual embedding, e. Tokens without a row have that of token 0."""

    embedding: Part  # [tokens, layers * size]
    projection: Part  # [layers * size, hidden]
    norm: RMSNormSpec  # of each layer's part
