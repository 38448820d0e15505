"""The parts of a model, their names in files, and mixtures of experts.

A family of models is one `Architecture`. It makes a `DecoderSpec` from a configuration; the file readers, the layers of
`gpu.models` and the C++ library of `gpu.cpu` work from that. A different computation is another class, not a flag: code
dispatches on the class, and refuses classes that it does not support.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from gpu.checkpoint.config import HeaderField, ModelConfig, RopeScaling

Ranges = tuple[tuple[int, int], ...]  # for each dimension of a tensor, the begin and the end of a part


@dataclass(frozen=True)
class Stack:
    """A tensor of a Hugging Face checkpoint that holds a matrix of every expert, [experts, in_features, outputs],
    possibly with biases `name`_bias [experts, outputs] or in MXFP4 (`gpu.checkpoint.tensors`). Without experts: a
    matrix [outputs, in_features] that stacks several parts by rows (`fused`)."""

    name: str
    start: int = 0  # the part's first output; it has every `step`-th from there
    step: int = 1
    in_gguf: bool = False  # GGUF files stack the parts, too
    stop: int | None = None  # the end of the part's outputs, exclusive; None: the last output
    outputs_first: bool = False  # the tensor is [experts, outputs, in_features]
    run: int = 0  # `step` parts take turns of so many rows, and `start` is this part's turn; 0: its rows are together


@dataclass(frozen=True)
class HeadOrder:
    """The order of a head's rows in a file. The first `rotary` rows rotate in pairs: adjacent rows if `interleaved`,
    else rows `rotary` / 2 apart.

    Readers reorder the rows so that the two rows of each pair are half a head apart, rotating pairs first. Queries and
    keys are reordered alike, so no score changes, and one rotation serves all models.
    """

    dim: int
    rotary: int
    interleaved: bool

    def rows(self) -> tuple[int, ...]:
        """Return, for each row of a head, its row in the file."""
        half, others = self.rotary // 2, (self.dim - self.rotary) // 2
        pairs = [(2 * i, 2 * i + 1) if self.interleaved else (i, half + i) for i in range(half)]
        pairs += [(self.rotary + i, self.rotary + others + i) for i in range(others)]
        return tuple(row for rows in zip(*pairs, strict=True) for row in rows)


@dataclass(frozen=True)
class Part:
    """A matrix [out_features, in_features] or a vector, possibly with a bias [out_features]."""

    name: str  # in a Hugging Face checkpoint, without `suffix` and ".bias"
    gguf: str  # its name in a GGUF file, likewise
    shape: tuple[int, ...]
    bias: bool = False
    offset: float = 0.0  # added to a Hugging Face checkpoint's numbers; GGUF files store the sums
    order: HeadOrder | None = None  # row order of each head in a Hugging Face checkpoint; None: this project's
    gguf_order: HeadOrder | None = None  # the same in a GGUF file
    suffix: str = ".weight"  # in a Hugging Face checkpoint; GGUF files have this one, and ".bias" for "_bias"
    ranges: Ranges | None = None  # ranges of the checkpoint's tensor, if this is one rank's part (`gpu.sharding`)
    expert: int | None = None  # its index in the tensor of all experts, in a GGUF file or in a `stack`
    stack: Stack | None = None  # None: the part has its own tensor in a Hugging Face checkpoint

    @property
    def rows(self) -> slice | list[int]:
        stack = self.stack
        if stack is not None and stack.run:
            return [row for row in range(stack.step * self.shape[0]) if row // stack.run % stack.step == stack.start]
        start = stack.start if stack is not None else 0
        return slice(start, start + self.shape[0])

    @property
    def weight_name(self) -> str:
        """The name of the matrix or vector in a Hugging Face checkpoint."""
        return self.name + self.suffix


@dataclass(frozen=True)
class RMSNormSpec:
    """Root-mean-square normalization of vectors of the weight's size."""

    weight: Part
    eps: float


@dataclass(frozen=True)
class Heads:
    """The heads of an attention layer. Layers with equal heads share the preparation of a step."""

    query: int
    kv: int
    dim: int
    scale: float  # scores are multiplied by it
    window: int | None = None  # tokens that a query sees, itself included; None: all
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    values: int | None = None  # a value is the first numbers of its key, so many; None: values are cached, too

    @property
    def cached(self) -> int:
        """The numbers that a layer caches for a token."""
        return self.kv * self.dim * (1 if self.values else 2)


@dataclass(frozen=True)
class Rope:
    """The angles of rotary positions (`gpu.rotary`). Layers with equal angles share a table."""

    theta: float
    scaling: RopeScaling | None = None
    dim: int | None = None  # rotating dimensions: the first dim / 2 of each half of a head; None: all
    size: int | None = None  # only this many first dimensions of a head rotate; None: all
    proportional: bool = False  # the pairs that rotate have the angles that they have if all rotate


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention with rotary positions. `qk_norm` normalizes each query and key head before the rotation;
    with `norm_together`, all query heads are one vector and all key heads another.

    `sinks` [query heads] are additional scores, as in gpt-oss (Xiao et al., arXiv:2309.17453, uses tokens instead):
    each counts in its head's softmax but has no value. Neither scale nor softcap changes them.
    """

    heads: Heads
    qkv: tuple[Part, ...]
    out: Part
    qk_norm: tuple[RMSNormSpec, ...] | None
    rope: Rope
    sinks: Part | None = None
    norm_together: bool = False
    has_kernel: ClassVar[bool] = True  # for CUDA devices, see `DecoderSpec.has_kernels`


@dataclass(frozen=True)
class GatedAttentionSpec(AttentionSpec):
    """Attention with its output multiplied by the sigmoid of a gate (Qiu et al., arXiv:2505.06708). The first
    projection has, for each query head, the query and then the gate."""

    has_kernel: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec(AttentionSpec):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values of all heads are products of a
    latent of the token. The latent is cached, with one rotated key that all heads share.

    A head's matrix from latents to keys can be applied to its query instead, and its matrix from latents to values to
    its output. In that form, which `heads` describes, all query heads have one key: the latent and the rotated key.
    `qkv` are the projections to queries, to latents and the rotated key, and from latents to each head's key and value.
    """

    has_kernel: ClassVar[bool] = False
    latent_norm: RMSNormSpec
    query_latent: tuple[Part, RMSNormSpec] | None  # queries are projected from this normalized projection
    interleaved: bool  # the two numbers of a rotating pair are adjacent, else half of the rotating numbers apart


@dataclass(frozen=True)
class ForeignAttentionSpec(AttentionSpec):
    """Attention in a layer that transformers computes. Only the numbers of key heads and their size are known."""

    has_kernel: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """A layer with a state for each request instead of keys and values: each channel passes a causal convolution over
    its latest tokens. A state is float32 and starts as zero: a `memory`, then the latest inputs of the convolution."""

    has_kernel: ClassVar[bool] = False
    projections: tuple[Part, ...]
    conv: tuple[Part, ...]  # each [channels, 1, tokens]
    out: Part

    @property
    def memory(self) -> tuple[int, ...]:
        """The shape of the state besides the inputs of the convolution."""
        return (0,)

    @property
    def vectors(self) -> tuple[Part, ...]:
        return ()

    @property
    def state_size(self) -> int:
        """The number of float32 values in a request's state."""
        return math.prod(self.memory) + sum(part.shape[0] * (part.shape[2] - 1) for part in self.conv)


@dataclass(frozen=True, kw_only=True)
class ShortConvSpec(StateSpec):
    """The layer out(c * conv(b * x)) of LFM2. Its projection has b, c and x."""


@dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec(StateSpec):
    """A gated delta net (Yang et al., arXiv:2412.06464): linear attention.

    Each value head has a memory S [key dim, value dim]. For a token with query q, key k and value v: S = exp(g) S;
    S += k (beta (v - S^T k))^T; the output is S^T q. Queries, keys and values have passed the convolution and silu.
    Consecutive value heads share a key head, or if `tiled`, every `key_heads`-th value head.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    dt_bias: Part  # [value heads], as is `a_log`
    a_log: Part
    norm: RMSNormSpec  # applied to each value head, before the output gate
    # True: two projections, (q, k, v, z) and (b, a), with rows grouped by key head. False: q, k, v, the output gate z,
    # b and a.
    by_key_head: bool
    tiled: bool = False  # as in GGUF files of Qwen3.5

    @property
    def memory(self) -> tuple[int, ...]:
        return (self.value_heads, self.key_dim, self.value_dim)

    @property
    def vectors(self) -> tuple[Part, ...]:
        return (self.dt_bias, self.a_log, self.norm.weight)


@dataclass(frozen=True, kw_only=True)
class Mamba2Spec(StateSpec):
    """Mamba 2 (Dao and Gu, arXiv:2405.21060). Each head has a memory S [state dim, head dim]. For a token with x, B, C
    and step t: S = exp(-exp(a_log) t) S + B (t x)^T; the output is S^T C + d x. One projection has the output gate z,
    then x, B and C, which pass the convolution and silu, then t. Consecutive heads share a B and a C.
    """

    heads: int
    head_dim: int
    groups: int  # of heads that share a B and a C
    state_dim: int
    dt_bias: Part  # [heads], as are `a_log` and `d`
    a_log: Part
    d: Part
    norm: RMSNormSpec  # applied to each group, after the output gate

    @property
    def memory(self) -> tuple[int, ...]:
        return (self.heads, self.state_dim, self.head_dim)

    @property
    def vectors(self) -> tuple[Part, ...]:
        return (self.dt_bias, self.a_log, self.d, self.norm.weight)


@dataclass(frozen=True)
class SwiGLUSpec:
    """The network down(silu(gate(x)) * up(x))."""

    gate: Part
    up: Part
    down: Part


@dataclass(frozen=True)
class GeGLUSpec(SwiGLUSpec):
    """The network down(gelu(gate(x)) * up(x)), with the tanh approximation of gelu."""


@dataclass(frozen=True)
class ClampedSwiGLUSpec(SwiGLUSpec):
    """The network down((u + 1) * g * sigmoid(alpha * g)) of gpt-oss: g is gate(x), at most `limit`; u is up(x), clamped
    to -limit and limit."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class MoESpec:
    """A mixture of experts (Shazeer et al., arXiv:1701.06538): the sum of the `top_k` experts with the largest router
    scores (lower index first if equal), each weighted by the softmax over all scores, or with `normalized` over the
    chosen scores. The `shared` expert, weighted by the sigmoid of `shared_gate` if there is one, is added for every
    token."""

    router: Part  # [experts of the model, hidden]
    experts: tuple[SwiGLUSpec, ...]  # all of one kind and shape; a rank may have some of the model's
    top_k: int
    normalized: bool
    first: int = 0  # the index of `experts[0]` in the model
    shared: SwiGLUSpec | None = None  # None: the model has none, or another rank holds it
    shared_gate: Part | None = None  # [1, hidden]


@dataclass(frozen=True, kw_only=True)
class GroupedMoESpec(MoESpec):
    """A mixture of experts where the router first chooses groups of experts (DeepSeek-V3, arXiv:2412.19437), by the sum
    of the best two scores in a group, and then experts of these groups.

    Scores are sigmoids, to which `correction` is added for the choices only; without it they are the softmax, and a
    group has its best score. Weights are the scores, with `normalized` divided by their sum, times `scale`.
    """

    correction: Part | None  # float32 [experts of the model]
    num_groups: int
    top_groups: int
    scale: float


@dataclass(frozen=True)
class LayerSpec:
    """Attention and a feed-forward network. Each may have a norm before and another after it; its output is added to
    the residual stream. Kinds of networks form a union here, so that mypy finds code that misses a kind."""

    attention_norm: RMSNormSpec | None
    attention: Any  # an AttentionSpec, or a StateSpec
    feed_forward_norm: RMSNormSpec | None
    feed_forward: SwiGLUSpec | GeGLUSpec | MoESpec
    attention_post_norm: RMSNormSpec | None = None
    feed_forward_post_norm: RMSNormSpec | None = None


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer, or one rank's part of it (`gpu.sharding`): only the last stage has norm and head.
    Only the first has the embedding, but if it is also the head, the last has it too."""

    embedding: Part | None
    layers: tuple[LayerSpec, ...]
    norm: RMSNormSpec | None
    head: Part | None  # None: the embedding is the head too
    embedding_scale: float = 1.0  # rows of the embedding are multiplied by it
    rounds_scale: bool = False  # the scale is first rounded to the type of the embedding
    logits_scale: float = 1.0  # logits are multiplied by it
    softcap: float | None = None  # logits become softcap * tanh(logit / softcap)
    first_layer: int = 0  # the index of `layers[0]` in the model
    keeps_packed: bool = False  # linear layers of a quantized checkpoint stay as they are stored, where a kernel can
    per_layer: Any = None  # a `gemma_layers.PerLayerEmbeddingSpec`, if each layer has an embedding
    streams: Any = None  # a `gemma_layers.StreamsSpec`, if there are several residual streams

    @property
    def has_kernels(self) -> bool:
        """True if attention of every layer has a kernel for CUDA devices. Otherwise torch's operations compute there,
        without CUDA graphs, and the batch is kept on the host."""
        return all(layer.attention.has_kernel for layer in self.layers)

    @property
    def linear_weights(self) -> frozenset[str]:
        """The matrices of linear layers. Embedding, head and experts have kernels of their own."""
        mixtures = (record for record in records_of(self.layers) if isinstance(record, MoESpec))
        experts = {part.weight_name for mixture in mixtures for part in parts_of(mixture.experts)}
        return frozenset(part.weight_name for part in parts_of(self.layers) if len(part.shape) == 2) - experts

    @property
    def state_layers(self) -> tuple[StateSpec, ...]:
        """The layers that have a state instead of keys and values."""
        return tuple(layer.attention for layer in self.layers if isinstance(layer.attention, StateSpec))

    @property
    def state_bytes(self) -> int:
        """The bytes of a request's states over all layers; 0 if no layer has a state."""
        return sum(4 * layer.state_size for layer in self.state_layers)


def records_of(spec: object) -> Iterator[Any]:
    """Yield `spec` and all records within it, in the order of their fields."""
    if isinstance(spec, tuple):
        for item in spec:
            yield from records_of(item)
    elif hasattr(spec, "__dataclass_fields__"):
        yield spec
        for item in vars(spec).values():  # in the order of the fields; `dataclasses.fields` is slow
            yield from records_of(item)


def parts_of(spec: object) -> Iterator[Part]:
    """Yield all parts of a decoder or a layer."""
    return (record for record in records_of(spec) if isinstance(record, Part))


def norm_of_layer(
    config: ModelConfig, index: int, name: str, gguf: str, size: int | None = None, **more: Any
) -> RMSNormSpec:
    """Return a norm by its names within a layer; `size` None: of the residual stream."""
    size = config.hidden_size if size is None else size
    return RMSNormSpec(
        Part(f"model.layers.{index}.{name}", f"blk.{index}.{gguf}", (size,), **more), config.rms_norm_eps
    )


def llama_layer(
    config: ModelConfig, index: int, *, gguf_interleaved: bool = False, interleaved: bool = False
) -> LayerSpec:
    """Return the `LayerSpec` of a Llama layer, reused by most families. Rotating pairs are adjacent rows in all files
    if `interleaved`, or only in GGUF files if `gguf_interleaved`."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    rotary = dim if config.rotary_dim is None else config.rotary_dim
    order = HeadOrder(dim, rotary, interleaved) if interleaved or rotary != dim else None
    orders = {"order": order, "gguf_order": HeadOrder(dim, rotary, True) if gguf_interleaved else order}
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, dim, dim**-0.5, config.window(index))

    def part(name: str, gguf: str, *shape: int, **more: Any) -> Part:
        return Part(f"model.layers.{index}.{name}", f"blk.{index}.{gguf}", shape, **more)

    def norm(name: str, gguf: str, size: int, **more: Any) -> RMSNormSpec:
        return norm_of_layer(config, index, name, gguf, size, **more)

    def projection(letter: str, heads: int, **more: Any) -> Part:
        name, gguf = f"self_attn.{letter}_proj", f"attn_{letter}"
        return part(name, gguf, heads * dim, hidden, bias=config.attention_bias, **more)

    return LayerSpec(
        attention_norm=norm("input_layernorm", "attn_norm", hidden),
        attention=AttentionSpec(
            heads=heads,
            qkv=(
                projection("q", heads.query, **orders),
                projection("k", heads.kv, **orders),
                projection("v", heads.kv),
            ),
            out=part("self_attn.o_proj", "attn_output", hidden, heads.query * dim),
            qk_norm=(
                norm("self_attn.q_norm", "attn_q_norm", dim, **orders),
                norm("self_attn.k_norm", "attn_k_norm", dim, **orders),
            )
            if config.qk_norm
            else None,
            rope=Rope(config.rope_theta, dim=0)
            if index in config.layers_without_rope
            else Rope(config.rope_theta, config.rope_scaling, config.rotary_dim),
        ),
        feed_forward_norm=norm("post_attention_layernorm", "ffn_norm", hidden),
        feed_forward=SwiGLUSpec(
            gate=part("mlp.gate_proj", "ffn_gate", inner, hidden),
            up=part("mlp.up_proj", "ffn_up", inner, hidden),
            down=part("mlp.down_proj", "ffn_down", hidden, inner),
        ),
    )


def fused(name: str, gguf: str | None, *parts: Part) -> tuple[Part, ...]:
    """Return `parts` as row ranges of the matrix `name` that stacks them. `gguf` None: GGUF files do not stack them."""
    starts = itertools.accumulate((part.shape[0] for part in parts), initial=0)
    return tuple(
        replace(part, gguf=gguf or part.gguf, stack=Stack(f"{name}.weight", start, in_gguf=gguf is not None))
        for part, start in zip(parts, starts, strict=False)
    )


def fused_network(network: object, name: str, gguf: str | None) -> SwiGLUSpec:
    """Return `network` with gate and up stacked in one matrix."""
    assert isinstance(network, SwiGLUSpec)
    gate, up = fused(name, gguf, network.gate, network.up)
    return replace(network, gate=gate, up=up)


# Keys of config.json that change the computation, with the values that a Llama layer implements.
PARTIAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None),
    "mlp_bias": (False, None),
    "per_layer_config": (None,),  # sizes of single layers
    "quantization_config": (None,),
}
LLAMA_VALUES = {**PARTIAL_VALUES, "partial_rotary_factor": (1.0, None)}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One family of models: how to read its files, and the parts of its layers. Numbers common to all families are in
    `gpu.checkpoint.config`."""

    name: str  # in `architectures` of config.json
    gguf: str | None = None  # `general.architecture` of GGUF files; None: no such files, or they name another family
    # The values of keys that a config.json lacks: the defaults of transformers' configuration class for this family.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    nullable: frozenset[str] = frozenset({"sliding_window"})  # numbers that may be null in config.json
    model_type: str | None = None  # the value in config.json by which transformers chooses the family
    allowed_values: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: LLAMA_VALUES)
    attention_bias: bool | str = False  # on q, k and v, or the key that says so; in GGUF files the tensors show it
    qk_norm: bool = False  # likewise
    numbers: Mapping[str, HeaderField] = field(default_factory=dict)  # only this family's, for `ModelConfig.numbers`
    quantizations: frozenset[str] = frozenset()  # supported values of `quant_method` in config.json, besides none
    yarn_truncate: bool = True  # `RopeScaling.truncate` for GGUF files, which do not have it
    aliases: Mapping[str, str] = field(default_factory=dict)  # this project's keys -> config.json's names
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = dict  # config.json with keys as other families name them
    partial_rotary: bool = False  # only a part of each head may rotate
    rope_types: Mapping[str, str] = field(default_factory=dict)  # other names of scalings in config.json
    query_scaling: bool = False  # queries grow with their positions: `RopeScaling.query_beta`
    no_rope_interval: int = 0  # by default, every n-th layer has no positions; 0: all have
    state_layers: str = ""  # what config.json calls layers with a state (`StateSpec`); "": there are none
    full_layers: int = 0  # by default, every n-th layer has no window; 0: all have one
    # The keys of config.json that decide which layers have a window; transformers ignores the others for this family.
    window_keys: frozenset[str] = frozenset()
    # Completes the configuration of a header, given the parsed config.json (empty for GGUF files) and the model's name
    # for errors. Raises ModelError for numbers that contradict each other.
    complete: Callable[[ModelConfig, Mapping[str, Any], str], ModelConfig] = lambda config, values, source: config
    # Changes the keys and values of config.json into those that this project reads; the text names the model in errors.
    rewrite: Callable[[dict[str, Any], str], dict[str, Any]] = lambda values, _: values
    layer: Callable[[ModelConfig, int], LayerSpec] = llama_layer
    finish: Callable[[DecoderSpec, ModelConfig], DecoderSpec] = lambda spec, _: spec  # changes outside of the layers

    def spec(self, config: ModelConfig) -> DecoderSpec:
        size = (config.vocab_size, config.hidden_size)
        spec = DecoderSpec(
            embedding=Part("model.embed_tokens", "token_embd", size),
            layers=tuple(self.layer(config, index) for index in range(config.num_hidden_layers)),
            norm=RMSNormSpec(Part("model.norm", "output_norm", (config.hidden_size,)), config.rms_norm_eps),
            head=None if config.tie_word_embeddings else Part("lm_head", "output", size),
        )
        return self.finish(spec, config)


def foreign_spec(config: ModelConfig) -> DecoderSpec:
    """Return what is known of a model that transformers computes. One part stands for all tensors."""
    every = Part("every tensor", "", (int(config.numbers["num_weights"]),))
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim, 1.0)
    attention = ForeignAttentionSpec(heads, (every, every, every), every, None, Rope(config.rope_theta))
    layer = LayerSpec(None, attention, None, SwiGLUSpec(every, every, every))
    return DecoderSpec(every, (layer,) * config.num_hidden_layers, None, every)


_NETWORKS = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")


def mixture_of_experts(
    config: ModelConfig,
    index: int,
    *,
    router: str,
    networks: tuple[str, str, str] = _NETWORKS,
    inner: int,
    normalized: bool,
    bias: bool = False,
    stacks: tuple[Stack, Stack, Stack] | None = None,
    clamp: tuple[float, float] | None = None,
) -> MoESpec:
    """Return the mixture of experts of layer `index`. `router`, `networks` (gate, up, down, with a placeholder for the
    expert's number) and `stacks` are tensor names within the layer. `clamp` is (alpha, limit)."""
    hidden, count = config.hidden_size, config.num_experts
    prefix = f"model.layers.{index}"
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    ggufs = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")

    def part(expert: int, place: int) -> Part:
        stack = stacks[place] if stacks else None
        return Part(
            f"{prefix}.{networks[place].format(expert)}",
            f"blk.{index}.{ggufs[place]}",
            shapes[place],
            bias=bias,
            expert=expert,
            stack=stack and replace(stack, name=f"{prefix}.{stack.name}"),
        )

    def network(expert: int) -> SwiGLUSpec:
        gate, up, down = (part(expert, place) for place in range(3))
        return SwiGLUSpec(gate, up, down) if clamp is None else ClampedSwiGLUSpec(gate, up, down, *clamp)

    return MoESpec(
        router=Part(f"{prefix}.{router}", f"blk.{index}.ffn_gate_inp", (count, hidden), bias=bias),
        experts=tuple(map(network, range(count))),
        top_k=int(config.numbers["num_experts_per_tok"]),
        normalized=normalized,
    )


def stacked_experts(config: ModelConfig, index: int) -> MoESpec:
    """Return the experts of layer `index`. Files hold a tensor for each matrix, or stack a layer's experts in two."""
    inner = int(config.numbers["moe_intermediate_size"])
    gate = Stack("mlp.experts.gate_up_proj", stop=inner, outputs_first=True)
    return mixture_of_experts(
        config,
        index,
        router="mlp.gate",
        inner=inner,
        normalized=bool(config.numbers["norm_topk_prob"]),
        stacks=(gate, replace(gate, start=inner, stop=None), replace(gate, name="mlp.experts.down_proj", stop=None)),
    )


def with_shared_expert(
    experts: MoESpec, config: ModelConfig, index: int, inner: int, *, name: str = "shared_expert", gated: bool = True
) -> MoESpec:
    """Return the mixture of layer `index` with a shared expert, weighted by the sigmoid of a gate if `gated`."""
    prefix, gguf, hidden = f"model.layers.{index}.mlp.{name}", f"blk.{index}.ffn", config.hidden_size
    shared = SwiGLUSpec(
        Part(f"{prefix}.gate_proj", f"{gguf}_gate_shexp", (inner, hidden)),
        Part(f"{prefix}.up_proj", f"{gguf}_up_shexp", (inner, hidden)),
        Part(f"{prefix}.down_proj", f"{gguf}_down_shexp", (hidden, inner)),
    )
    gate = Part(f"{prefix}_gate", f"{gguf}_gate_inp_shexp", (1, hidden)) if gated else None
    return replace(experts, shared=shared, shared_gate=gate)
