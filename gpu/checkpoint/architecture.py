"""The parts of a model, their names in files, and mixtures of experts.

A family of models is one `Architecture`. With a configuration it gives a `DecoderSpec`, which the readers of files, the
layers of `gpu.models` and the library of `gpu.cpu` use. Another computation is another class instead of a flag: readers
choose by the class, and refuse one that they do not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpu.checkpoint.config import HeaderField, ModelConfig, RopeScaling

Ranges = tuple[tuple[int, int], ...]  # of each dimension of a tensor: where a part begins and ends


@dataclass(frozen=True)
class Stack:
    """A tensor of a Hugging Face checkpoint with a part of every expert, [experts, in_features, outputs], possibly with
    biases `name`_bias [experts, outputs]. It may be in MXFP4: `gpu.checkpoint.tensors`."""

    name: str
    start: int = 0  # the part has every `step`-th output from this one on
    step: int = 1


@dataclass(frozen=True)
class Part:
    """A matrix [out_features, in_features] or a vector, possibly with a bias [out_features]."""

    name: str  # in a Hugging Face checkpoint, without `suffix` and ".bias"
    gguf: str  # the same in a GGUF file
    shape: tuple[int, ...]
    bias: bool = False
    offset: float = 0.0  # added to the numbers of a Hugging Face checkpoint; a GGUF file has the sums
    gguf_heads: int = 0  # heads with rows in another order in a GGUF file (`gpu.checkpoint.gguf_model`)
    suffix: str = ".weight"  # a GGUF file's is always this
    ranges: Ranges | None = None  # of the checkpoint's tensor, if this is one rank's part (`gpu.sharding`)
    expert: int | None = None  # its index in the tensor of all experts, in a GGUF file or in a `stack`
    stack: Stack | None = None  # None: it has a tensor of its own in a Hugging Face checkpoint

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


@dataclass(frozen=True)
class Rope:
    """The angles of rotary positions (`gpu.rotary`). Layers with equal angles share a table."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention with rotary positions; `qk_norm` normalizes each query and key head before them.

    `sinks` [query heads] are additional scores, as in gpt-oss (Xiao et al., arXiv:2309.17453, uses tokens instead):
    each takes its share of its head's softmax and adds no value. Neither scale nor softcap changes them.
    """

    heads: Heads
    qkv: tuple[Part, Part, Part]
    out: Part
    qk_norm: tuple[RMSNormSpec, RMSNormSpec] | None
    rope: Rope
    sinks: Part | None = None


@dataclass(frozen=True)
class SwiGLUSpec:
    """The network down(silu(gate(x)) * up(x))."""

    gate: Part
    up: Part
    down: Part


@dataclass(frozen=True)
class GeGLUSpec(SwiGLUSpec):
    """down(gelu(gate(x)) * up(x)), where gelu is approximated by a tanh."""


@dataclass(frozen=True)
class ClampedSwiGLUSpec(SwiGLUSpec):
    """down((u + 1) * g * sigmoid(alpha * g)), as in gpt-oss: g is gate(x) limited to `limit` from above, and u is up(x)
    limited to -limit and limit."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class MoESpec:
    """A mixture of experts (Shazeer et al., arXiv:1701.06538): the sum of the `top_k` experts with the largest scores
    of the router (of equal ones the first), each times its share of the softmax over all scores, or with `normalized`
    over the chosen experts' scores."""

    router: Part  # [experts of the model, hidden]
    experts: tuple[SwiGLUSpec, ...]  # all of one kind and shape; a rank may have some of the model's
    top_k: int
    normalized: bool
    first: int = 0  # the index of `experts[0]` in the model


@dataclass(frozen=True)
class LayerSpec:
    """Attention and a feed-forward network. Each comes after its norm, and its output is added to the residual stream,
    possibly after another norm. Kinds of networks form a union here, so mypy names readers that lack one."""

    attention_norm: RMSNormSpec
    attention: AttentionSpec
    feed_forward_norm: RMSNormSpec
    feed_forward: SwiGLUSpec | GeGLUSpec | MoESpec
    attention_post_norm: RMSNormSpec | None = None
    feed_forward_post_norm: RMSNormSpec | None = None


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer, or one rank's part of it (`gpu.sharding`): only the last stage has norm and head, and
    only the first has the embedding, unless it is also the head of the last."""

    embedding: Part | None
    layers: tuple[LayerSpec, ...]
    norm: RMSNormSpec | None
    head: Part | None  # None: the embedding is the head too
    embedding_scale: float = 1.0  # rows of the embedding are multiplied by it
    softcap: float | None = None  # logits become softcap * tanh(logit / softcap)
    first_layer: int = 0  # the index of `layers[0]` in the model


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


def llama_layer(config: ModelConfig, index: int, *, gguf_heads: bool = False) -> LayerSpec:
    """Return a layer of Llama, which most families share. `gguf_heads`: see `Part`."""
    hidden, inner, dim, eps = config.hidden_size, config.intermediate_size, config.head_dim, config.rms_norm_eps
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, dim, dim**-0.5, config.window(index))

    def part(name: str, gguf: str, *shape: int, **more: Any) -> Part:
        return Part(f"model.layers.{index}.{name}", f"blk.{index}.{gguf}", shape, **more)

    def norm(name: str, gguf: str, size: int) -> RMSNormSpec:
        return RMSNormSpec(part(name, gguf, size), eps)

    def projection(letter: str, heads: int, reordered: bool) -> Part:
        name, gguf = f"self_attn.{letter}_proj", f"attn_{letter}"
        return part(name, gguf, heads * dim, hidden, bias=config.attention_bias, gguf_heads=heads if reordered else 0)

    return LayerSpec(
        attention_norm=norm("input_layernorm", "attn_norm", hidden),
        attention=AttentionSpec(
            heads=heads,
            qkv=(
                projection("q", heads.query, gguf_heads),
                projection("k", heads.kv, gguf_heads),
                projection("v", heads.kv, False),
            ),
            out=part("self_attn.o_proj", "attn_output", hidden, heads.query * dim),
            qk_norm=(norm("self_attn.q_norm", "attn_q_norm", dim), norm("self_attn.k_norm", "attn_k_norm", dim))
            if config.qk_norm
            else None,
            rope=Rope(config.rope_theta, config.rope_scaling),
        ),
        feed_forward_norm=norm("post_attention_layernorm", "ffn_norm", hidden),
        feed_forward=SwiGLUSpec(
            gate=part("mlp.gate_proj", "ffn_gate", inner, hidden),
            up=part("mlp.up_proj", "ffn_up", inner, hidden),
            down=part("mlp.down_proj", "ffn_down", hidden, inner),
        ),
    )


# Keys of config.json that change the computation, with the only values that a layer of Llama implements.
LLAMA_VALUES: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One family of models: the names and meaning of its files, and the parts of its layers. The numbers that all
    families have are in `gpu.checkpoint.config`."""

    name: str  # in `architectures` of config.json
    gguf: str | None = None  # `general.architecture` of GGUF files; None: there are none, or they name another family
    # The values of keys that a config.json lacks: the defaults of transformers' configuration class for this family.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    nullable: frozenset[str] = frozenset({"sliding_window"})  # numbers for which config.json may have null
    model_type: str | None = None  # the value in config.json by which transformers chooses the family
    allowed_values: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: LLAMA_VALUES)
    attention_bias: bool = False  # on q, k and v; for a GGUF file its tensors decide
    qk_norm: bool = False  # likewise
    numbers: Mapping[str, HeaderField] = field(default_factory=dict)  # of this family alone, for `ModelConfig.numbers`
    quantizations: frozenset[str] = frozenset()  # supported values of `quant_method` in config.json, besides none
    yarn_truncate: bool = True  # `RopeScaling.truncate` for GGUF files, which do not have it
    full_layers: int = 0  # every n-th layer has no window if the file does not name them; 0: all have one
    # The keys of config.json that decide which layers have a window; transformers ignores the others for this family.
    window_keys: frozenset[str] = frozenset()
    layer: Callable[[ModelConfig, int], LayerSpec] = llama_layer
    finish: Callable[[DecoderSpec, ModelConfig], DecoderSpec] = lambda spec, _: spec  # changes other than of layers

    def spec(self, config: ModelConfig) -> DecoderSpec:
        """Return all parts of a model of this family."""
        size = (config.vocab_size, config.hidden_size)
        spec = DecoderSpec(
            embedding=Part("model.embed_tokens", "token_embd", size),
            layers=tuple(self.layer(config, index) for index in range(config.num_hidden_layers)),
            norm=RMSNormSpec(Part("model.norm", "output_norm", (config.hidden_size,)), config.rms_norm_eps),
            head=None if config.tie_word_embeddings else Part("lm_head", "output", size),
        )
        return self.finish(spec, config)


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
    """Return the mixture of layer `index`. `router`, `networks` (gate, up, down, with a place for the expert's number)
    and `stacks` are names within the layer. `clamp` is alpha and limit."""
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
            stack=stack and Stack(f"{prefix}.{stack.name}", stack.start, stack.step),
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
