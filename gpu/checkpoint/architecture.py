"""The parts of a model, their names in files, and mixtures of experts.

A family of models is one `Architecture`. With a configuration it gives a `DecoderSpec`, which everybody reads who has
to do with weights: the readers of files, the layers of `gpu.models`, the library of `gpu.cpu`. What computes something
else is another class here and not a flag: readers choose by the class, and refuse one that they do not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpu.checkpoint.config import HeaderField, ModelConfig, RopeScaling

Ranges = tuple[tuple[int, int], ...]  # of each dimension of a tensor: where a part begins and ends


@dataclass(frozen=True)
class Stack:
    """A tensor of a Hugging Face checkpoint that holds a part of every expert, [experts, in_features, outputs], and
    perhaps one of their biases, `name`_bias [experts, outputs]. It may be there in MXFP4: `gpu.checkpoint.tensors`."""

    name: str
    start: int = 0  # which of the outputs are the part's: from this on every `step`-th
    step: int = 1


@dataclass(frozen=True)
class Part:
    """A matrix [out_features, in_features], or a vector, and perhaps a bias [out_features]."""

    name: str  # in a Hugging Face checkpoint, without `suffix` and ".bias"
    gguf: str  # the same in a GGUF file
    shape: tuple[int, ...]
    bias: bool = False
    offset: float = 0.0  # to be added to what a Hugging Face checkpoint has; a GGUF file has the sums
    gguf_heads: int = 0  # heads whose rows a GGUF file has in another order (`gpu.checkpoint.gguf_model`)
    suffix: str = ".weight"  # a GGUF file's is always this
    ranges: Ranges | None = None  # of the checkpoint's tensor, where this is one rank's part (`gpu.sharding`)
    expert: int | None = None  # in a GGUF file, and in a `stack`, it lies under this number among those of all experts
    stack: Stack | None = None  # None: it has a tensor of its own in a Hugging Face checkpoint

    @property
    def weight_name(self) -> str:
        """Of the matrix or vector in a Hugging Face checkpoint."""
        return self.name + self.suffix


@dataclass(frozen=True)
class RMSNormSpec:
    """Root-mean-square normalization of vectors of the weight's size."""

    weight: Part
    eps: float


@dataclass(frozen=True)
class Heads:
    """The heads of an attention layer. Layers of equal heads share what prepares a step."""

    query: int
    kv: int
    dim: int
    scale: float  # what scores are multiplied by
    window: int | None = None  # tokens that a query sees, itself included; None: all
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)


@dataclass(frozen=True)
class Rope:
    """The angles of rotary positions (`gpu.rotary`). Layers of equal ones share a table."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention with rotary positions; `qk_norm` normalizes each query and key head before them.

    `sinks` [query heads] are scores of nothing, as gpt-oss has them (Xiao et al., arXiv:2309.17453, has tokens for it):
    each takes its share of its head's softmax, beside the tokens, and adds no value. Neither scale nor softcap changes
    them.
    """

    heads: Heads
    qkv: tuple[Part, Part, Part]
    out: Part
    qk_norm: tuple[RMSNormSpec, RMSNormSpec] | None
    rope: Rope
    sinks: Part | None = None


@dataclass(frozen=True)
class SwiGLUSpec:
    """down(silu(gate(x)) * up(x))"""

    gate: Part
    up: Part
    down: Part


@dataclass(frozen=True)
class GeGLUSpec(SwiGLUSpec):
    """down(gelu(gate(x)) * up(x)), where gelu is approximated by a tanh."""


@dataclass(frozen=True)
class ClampedSwiGLUSpec(SwiGLUSpec):
    """down((u + 1) * g * sigmoid(alpha * g)), as gpt-oss has it: g is gate(x), but `limit` at most, and u is up(x),
    kept within -limit and limit."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class MoESpec:
    """A mixture of experts (Shazeer et al., arXiv:1701.06538): the `top_k` experts to which the router gives the
    largest scores, of equal ones the first, added up by their shares of the softmax over all scores; with `normalized`
    over those of the chosen."""

    router: Part  # [experts of the model, hidden]
    experts: tuple[SwiGLUSpec, ...]  # all alike; those that are here
    top_k: int
    normalized: bool
    first: int = 0  # which of the model's experts the first of `experts` is


@dataclass(frozen=True)
class LayerSpec:
    """Attention and a feed-forward network, each behind its norm and added to the residual stream, perhaps normed again
    before that.

    Where there is another kind of either, it becomes a union here, and mypy names the readers that lack it.
    """

    attention_norm: RMSNormSpec
    attention: AttentionSpec
    feed_forward_norm: RMSNormSpec
    feed_forward: SwiGLUSpec | GeGLUSpec | MoESpec
    attention_post_norm: RMSNormSpec | None = None
    feed_forward_post_norm: RMSNormSpec | None = None


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer, or what one rank has of it (`gpu.sharding`): a stage that is not the last has
    neither norm nor head, and one that is not the first has an embedding only if that is its head."""

    embedding: Part | None
    layers: tuple[LayerSpec, ...]
    norm: RMSNormSpec | None
    head: Part | None  # None: the embedding is the head too
    embedding_scale: float = 1.0  # rows of the embedding are multiplied by it
    softcap: float | None = None  # logits become softcap * tanh(logit / softcap)
    first_layer: int = 0  # of the model's that `layers` begin with


def records_of(spec: object) -> Iterator[Any]:
    """`spec` and all records within it, in the order of their fields."""
    if isinstance(spec, tuple):
        for item in spec:
            yield from records_of(item)
    elif hasattr(spec, "__dataclass_fields__"):
        yield spec
        for item in vars(spec).values():  # in the order of the fields, which `dataclasses.fields` takes long to tell
            yield from records_of(item)


def parts_of(spec: object) -> Iterator[Part]:
    """All parts of a decoder or of a layer."""
    return (record for record in records_of(spec) if isinstance(record, Part))


def llama_layer(config: ModelConfig, index: int, *, gguf_heads: bool = False) -> LayerSpec:
    """A layer of Llama, which most families share. `gguf_heads`: see `Part`."""
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
    """One family of models: what its files are called and mean, and what each of its layers is made of.

    The numbers that all families have are in `gpu.checkpoint.config`.
    """

    name: str  # in `architectures` of config.json
    gguf: str | None = None  # `general.architecture` of a GGUF file; None: there are none, or they say another family's
    # The values of keys that a config.json lacks: the defaults of transformers' configuration class for this family.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    nullable: frozenset[str] = frozenset({"sliding_window"})  # numbers for which config.json may have null
    model_type: str | None = None  # the value in config.json by which transformers chooses the family
    allowed_values: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: LLAMA_VALUES)
    attention_bias: bool = False  # on q, k and v; a GGUF file shows by its tensors whether there are any
    qk_norm: bool = False  # likewise
    numbers: Mapping[str, HeaderField] = field(default_factory=dict)  # its own, for `ModelConfig.numbers`
    quantizations: frozenset[str] = frozenset()  # `quant_method` of config.json that are read, besides none
    yarn_truncate: bool = True  # `RopeScaling.truncate` of its GGUF files, which do not say it
    full_layers: int = 0  # with windows every so many-th layer sees all where no file says which; 0: none does
    # The keys of config.json that decide which layers have a window; transformers ignores the others for this family.
    window_keys: frozenset[str] = frozenset()
    layer: Callable[[ModelConfig, int], LayerSpec] = llama_layer
    finish: Callable[[DecoderSpec, ModelConfig], DecoderSpec] = lambda spec, _: spec  # what is not a layer's

    def spec(self, config: ModelConfig) -> DecoderSpec:
        """All parts of a model of this family."""
        size = (config.vocab_size, config.hidden_size)
        spec = DecoderSpec(
            embedding=Part("model.embed_tokens", "token_embd", size),
            layers=tuple(self.layer(config, index) for index in range(config.num_hidden_layers)),
            norm=RMSNormSpec(Part("model.norm", "output_norm", (config.hidden_size,)), config.rms_norm_eps),
            head=None if config.tie_word_embeddings else Part("lm_head", "output", size),
        )
        return self.finish(spec, config)


# -------------------------------------------------------------------------------------------------------------- experts
# What the families with a mixture of experts have in common.


def mixture_of_experts(
    config: ModelConfig,
    index: int,
    *,
    router: str,
    networks: tuple[str, str, str],
    inner: int,
    normalized: bool,
    bias: bool = False,
    stacks: tuple[Stack, Stack, Stack] | None = None,
    clamp: tuple[float, float] | None = None,
) -> MoESpec:
    """Of layer `index`. `router` and `networks` (gate, up, down) are names within it, the latter with the place of the
    expert's number; `stacks`, where there are some, of tensors within it. `clamp`: alpha and limit."""
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
