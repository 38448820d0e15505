"""The families of encoders. A reader gives each its numbers by the names of config.json, from a GGUF file too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from gpu.checkpoint.architecture import GeGLUSpec, Heads, Part, Rope, fused
from gpu.checkpoint.config import FIELDS, FLAG, HeaderField, ModelConfig, ModelError, check_field, shown
from gpu.checkpoint.encoder import (
    DenseSpec,
    EncoderAttentionSpec,
    EncoderLayerSpec,
    EncoderNetworkSpec,
    EncoderSpec,
    LayerNormSpec,
)
from gpu.checkpoint.families.gemma import GEMMA3
from gpu.checkpoint.hf_config import FULL, SLIDING, config_from_hf

CLASSIFIER = "ForSequenceClassification"
ACTIVATIONS = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_tanh"), "gelu_tanh"),
    **dict.fromkeys(("silu", "swish", "swiglu"), "silu"),
    "relu": "relu",
}
_OWN = {
    "layer_norm_eps": FIELDS["rms_norm_eps"],
    "type_vocab_size": HeaderField(int, 0, 2**10, "types"),
    "pad_token_id": HeaderField(int, 0, 2**20, ""),
    "num_labels": HeaderField(int, 1, 2**16, "labels"),
    "local_attention": HeaderField(int, 1, 2**24, "tokens"),
    "global_attn_every_n_layers": HeaderField(int, 1, 2**10, "layers"),
}


class EncoderValues:
    """Values of an encoder's header by the names of config.json, with the family's other names and defaults."""

    def __init__(self, values: Mapping[str, Any], family: EncoderFamily, where: str) -> None:
        """`where` names the model and the header in errors."""
        renamed = {name: values[other] for name, other in family.aliases.items() if values.get(other) is not None}
        self.values = {**family.defaults, **{key: value for key, value in values.items() if value is not None}}
        self.values |= renamed
        self.where = where
        self.labels = 0  # of its classification head; 0: it has none

    def number(self, name: str, default: float | None = None) -> Any:
        field = _OWN.get(name) or FIELDS[name]
        return check_field(field, self.values.get(name, default), key=name, source=self.where)

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(check_field(FLAG, self.values.get(name, default), key=name, source=self.where))

    def activation(self, name: str) -> str:
        found = self.values.get(name, "gelu")
        if found not in ACTIVATIONS:
            raise self.error(name, f"one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[found]

    def error(self, name: str, allowed: str) -> ModelError:
        return ModelError(
            f"{self.where}: {name}={shown(self.values.get(name))} is not supported; it must be {allowed}."
        )

    def norm(self, name: str, gguf: str) -> LayerNormSpec:
        part = Part(name, gguf, (self.number("hidden_size"),), bias=self.flag("norm_bias", True))
        return LayerNormSpec(part, self.number("layer_norm_eps"))

    def dense(self, name: str, gguf: str, outputs: int, activation: str = "identity", bias: bool = True) -> DenseSpec:
        shape = (outputs, self.number("hidden_size"))
        return DenseSpec(weight=Part(name, gguf, shape, bias=bias), activation=activation)


@dataclass(frozen=True, kw_only=True)
class EncoderFamily:
    """One family of encoders: the names and the defaults of its numbers, and its parts."""

    names: tuple[str, ...]  # the architectures' names begin with them
    model_type: str
    gguf: str | None = None  # `general.architecture` of GGUF files
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)  # BERT's names of numbers -> the family's
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    spec: Callable[[EncoderValues], EncoderSpec]
    ends: tuple[str, ...] = ("Model", "ForMaskedLM", "ForPreTraining", CLASSIFIER)


def encoder_family(values: Mapping[str, Any]) -> tuple[EncoderFamily, str] | None:
    """Return the family of a config.json and the kind of its head; None if it is not an encoder's."""
    named = values.get("architectures")
    if named == ["HF_ColBERT"] and values.get("model_type") == BERT.model_type:
        return BERT, "Model"  # with a layer for every token, see `with_colbert`
    for architecture in named if isinstance(named, list) else []:
        for family in ENCODERS:
            for name in family.names:
                if isinstance(architecture, str) and architecture.startswith(name):
                    end = architecture.removeprefix(name)
                    if end in family.ends and values.get("model_type", family.model_type) == family.model_type:
                        return family, end
    return None


def encoder_config(
    family: EncoderFamily, head: str, values: Mapping[str, Any], *, where: str, **more: Any
) -> ModelConfig:
    """Return the configuration of an encoder with this `head`. `more` are other fields. Raises `ModelError` for wrong
    values."""
    found = EncoderValues(values, family, where)
    if head == CLASSIFIER:
        names = values.get("id2label")
        count = len(names) if isinstance(names, dict) else values.get("num_labels", 2)  # transformers' default
        found.labels = check_field(_OWN["num_labels"], count, key="num_labels", source=where)
    for name, allowed in {"is_decoder": (False,), "quantization_config": ()}.items() | family.allowed.items():
        if name in found.values and found.values[name] not in allowed:
            raise found.error(name, f"{allowed[0]!r}" if allowed else "left out")
    hidden, heads = found.number("hidden_size"), found.number("num_attention_heads")
    if hidden % heads:
        raise ModelError(f"{where}: hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads}).")
    spec = family.spec(found)
    longest = found.number("max_position_embeddings") - spec.first_position
    if longest < 1:
        raise found.error("max_position_embeddings", f"above {spec.first_position}")
    return ModelConfig(
        architecture=family.names[0] + head,
        vocab_size=found.number("vocab_size"),
        hidden_size=hidden,
        intermediate_size=found.number("intermediate_size"),
        num_hidden_layers=found.number("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=longest,
        encoder=spec,
        **more,
    )


def with_colbert(config: ModelConfig, outputs: int) -> ModelConfig:
    """Return an encoder's configuration with ColBERT's layer for every token, which has so many outputs."""
    layer = DenseSpec(weight=Part("linear", "", (outputs, config.hidden_size)), activation="identity")
    return replace(config, encoder=replace(config.encoder, token_dense=(layer,)))


# ----------------------------------------------------------------------------------------------------------- post-norm
# BERT and its relatives: the residual stream is normalized after each addition.


_BERT_NAMES = {
    "words": "embeddings.word_embeddings",
    "norm": "embeddings.LayerNorm",
    "layer": "encoder.layer",
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "out": "attention.output.dense",
    "out_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "down_norm": "output.LayerNorm",
}
_DISTILBERT_NAMES = _BERT_NAMES | {
    "layer": "transformer.layer",
    "q": "attention.q_lin",
    "k": "attention.k_lin",
    "v": "attention.v_lin",
    "out": "attention.out_lin",
    "out_norm": "sa_layer_norm",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "down_norm": "output_layer_norm",
}


def _attention(found: EncoderValues, qkv: tuple[Part, ...], out: Part, rope: Rope, reach: int | None = None) -> Any:
    heads, dim = found.number("num_attention_heads"), found.number("hidden_size") // found.number("num_attention_heads")
    return EncoderAttentionSpec(
        heads=Heads(heads, heads, dim, dim**-0.5), qkv=qkv, out=out, qk_norm=None, rope=rope, reach=reach
    )


_NO_ROPE = Rope(10000.0, dim=0)


def _bert_layer(found: EncoderValues, names: Mapping[str, str], index: int) -> EncoderLayerSpec:
    hidden, inner = found.number("hidden_size"), found.number("intermediate_size")
    prefix, gguf = f"{names['layer']}.{index}.", f"blk.{index}."

    def part(name: str, in_gguf: str, *shape: int) -> Part:
        return Part(prefix + names[name], gguf + in_gguf, shape, bias=True)

    q, k, v = (part(letter, f"attn_{letter}", hidden, hidden) for letter in "qkv")
    return EncoderLayerSpec(
        attention_norm=None,
        attention=_attention(found, (q, k, v), part("out", "attn_output", hidden, hidden), _NO_ROPE),
        attention_sum_norm=found.norm(prefix + names["out_norm"], f"{gguf}attn_output_norm"),
        feed_forward_norm=None,
        feed_forward=EncoderNetworkSpec(
            up=part("up", "ffn_up", inner, hidden),
            down=part("down", "ffn_down", hidden, inner),
            activation=found.activation("hidden_act"),
        ),
        feed_forward_sum_norm=found.norm(prefix + names["down_norm"], f"{gguf}layer_output_norm"),
    )


def _bert(
    found: EncoderValues,
    *,
    names: Mapping[str, str] = _BERT_NAMES,
    head: tuple[str, str, str] = ("pooler.dense", "classifier", "tanh"),
    skips_padding: bool = False,
) -> EncoderSpec:
    """`head` has the names of the layers of the classification head, and the activation between them."""
    hidden, types = found.number("hidden_size"), found.number("type_vocab_size", 0)
    padding = found.number("pad_token_id") if skips_padding else None
    classifier: tuple[DenseSpec, ...] = ()
    if found.labels:
        first, last, activation = head
        classifier = (found.dense(first, "cls", hidden, activation), found.dense(last, "cls.output", found.labels))
    return EncoderSpec(
        embedding=Part(names["words"], "token_embd", (found.number("vocab_size"), hidden)),
        positions=Part(
            "embeddings.position_embeddings", "position_embd", (found.number("max_position_embeddings"), hidden)
        ),
        first_position=0 if padding is None else padding + 1,
        padding=padding,
        token_types=Part("embeddings.token_type_embeddings", "token_types", (types, hidden)) if types else None,
        embedding_norm=found.norm(names["norm"], "token_embd_norm"),
        layers=tuple(_bert_layer(found, names, index) for index in range(found.number("num_hidden_layers"))),
        norm=None,
        head=None,
        classifier=classifier,
    )


_BERT_DEFAULTS = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}
_ABSOLUTE = {"position_embedding_type": ("absolute",)}
_ROBERTA_HEAD = ("classifier.dense", "classifier.out_proj", "tanh")

BERT = EncoderFamily(
    names=("Bert",), model_type="bert", gguf="bert", defaults=_BERT_DEFAULTS, allowed=_ABSOLUTE, spec=_bert
)
BERT_AS_ROBERTA = replace(BERT, spec=partial(_bert, head=_ROBERTA_HEAD))  # GGUF files of RoBERTa say BERT, too
ROBERTA = EncoderFamily(
    names=("Roberta",),
    model_type="roberta",
    defaults={**_BERT_DEFAULTS, "vocab_size": 50265, "pad_token_id": 1},
    allowed=_ABSOLUTE,
    spec=partial(_bert, head=_ROBERTA_HEAD, skips_padding=True),
)
XLM_ROBERTA = replace(
    ROBERTA,
    names=("XLMRoberta",),
    model_type="xlm-roberta",
    defaults={**_BERT_DEFAULTS, "vocab_size": 30522, "pad_token_id": 1},
)
CAMEMBERT = replace(XLM_ROBERTA, names=("Camembert",), model_type="camembert")
DISTILBERT = EncoderFamily(
    names=("DistilBert",),
    model_type="distilbert",
    defaults={**_BERT_DEFAULTS, "type_vocab_size": 0},
    aliases={
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
    },
    spec=partial(_bert, names=_DISTILBERT_NAMES, head=("pre_classifier", "classifier", "relu")),
)


# NomicBERT: BERT with rotary positions, gated networks and few biases. config.json of the published models has GPT-2's
# names. Their scaling of positions beyond those of the training is refused.
def _nomic_layer(found: EncoderValues, index: int) -> EncoderLayerSpec:
    hidden, inner = found.number("hidden_size"), found.number("intermediate_size")
    prefix, gguf = f"encoder.layers.{index}.", f"blk.{index}."
    part = Part(prefix, gguf, (hidden, hidden))
    qkv = (replace(part, name=f"{prefix}attn.{letter}_proj", gguf=f"{gguf}attn_{letter}") for letter in "qkv")
    return EncoderLayerSpec(
        attention_norm=None,
        attention=_attention(
            found,
            fused(f"{prefix}attn.Wqkv", f"{gguf}attn_qkv", *qkv),
            replace(part, name=f"{prefix}attn.out_proj", gguf=f"{gguf}attn_output"),
            Rope(_theta(found, found.values.get("rope_parameters"), 1000.0)),
        ),
        attention_sum_norm=found.norm(f"{prefix}norm1", f"{gguf}attn_output_norm"),
        feed_forward_norm=None,
        feed_forward=EncoderNetworkSpec(
            up=Part(f"{prefix}mlp.fc11", f"{gguf}ffn_up", (inner, hidden)),
            down=Part(f"{prefix}mlp.fc2", f"{gguf}ffn_down", (hidden, inner)),
            activation=found.activation("hidden_act"),
            gate=Part(f"{prefix}mlp.fc12", f"{gguf}ffn_gate", (inner, hidden)),
        ),
        feed_forward_sum_norm=found.norm(f"{prefix}norm2", f"{gguf}layer_output_norm"),
    )


def _nomic(found: EncoderValues) -> EncoderSpec:
    layers = tuple(_nomic_layer(found, index) for index in range(found.number("num_hidden_layers")))
    spec = _bert(found, names=_BERT_NAMES | {"norm": "emb_ln"})
    return replace(spec, positions=None, layers=layers)


def _theta(found: EncoderValues, rope: Any, default: float, key: str = "rotary_emb_base") -> float:
    """Return the base of a rotation: of `rope_parameters`, or under an older key."""
    rope = rope if isinstance(rope, dict) else {}
    if rope.get("rope_type", "default") != "default":
        raise ModelError(f"{found.where}: rope_type={shown(rope['rope_type'])} is not supported for encoders.")
    theta = rope.get("rope_theta", found.values.get(key, default))
    return float(check_field(FIELDS["rope_theta"], theta, key="rope_theta", source=found.where))


NOMIC_BERT = EncoderFamily(
    names=("NomicBert",),
    model_type="nomic_bert",
    gguf="nomic-bert",
    defaults={**_BERT_DEFAULTS, "vocab_size": 30528, "max_position_embeddings": 2048, "hidden_act": "silu"},
    aliases={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "hidden_act": "activation_function",
        "layer_norm_eps": "layer_norm_epsilon",
        "max_position_embeddings": "max_trained_positions",
    },
    allowed={
        **dict.fromkeys(
            ("prenorm", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "use_rms_norm", "causal"), (False,)
        ),
        **dict.fromkeys(("parallel_block", "rotary_emb_interleaved"), (False,)),
        "rotary_emb_fraction": (1.0,),
        "rotary_scaling_factor": (),
    },
    spec=_nomic,
)


# ------------------------------------------------------------------------------------------------------------ pre-norm
# ModernBERT (Warner et al., arXiv:2412.13663): norms before attention and network, and layers that see only the tokens
# near by.


def _modern_layer(found: EncoderValues, index: int, kind: str) -> EncoderLayerSpec:
    hidden, inner = found.number("hidden_size"), found.number("intermediate_size")
    prefix, gguf = f"model.layers.{index}.", f"blk.{index}."
    has_bias, of_network = found.flag("attention_bias"), found.flag("mlp_bias")
    is_full, rope = kind == FULL, found.values.get("rope_parameters")
    theta, key = (160000.0, "global_rope_theta") if is_full else (10000.0, "local_rope_theta")
    part = Part(prefix, gguf, (hidden, hidden), bias=has_bias)
    qkv = (replace(part, name=f"{prefix}attn.{letter}_proj", gguf=f"{gguf}attn_{letter}") for letter in "qkv")
    gate, up = (Part(f"{prefix}mlp.{name}", gguf, (inner, hidden), bias=of_network) for name in ("gate", "up"))
    gate, up = fused(f"{prefix}mlp.Wi", f"{gguf}ffn_up", gate, up)
    return EncoderLayerSpec(
        attention_norm=found.norm(f"{prefix}attn_norm", f"{gguf}attn_norm") if index else None,
        attention=_attention(
            found,
            fused(f"{prefix}attn.Wqkv", f"{gguf}attn_qkv", *qkv),
            replace(part, name=f"{prefix}attn.Wo", gguf=f"{gguf}attn_output"),
            Rope(_theta(found, rope.get(kind) if isinstance(rope, dict) else None, theta, key)),
            None if is_full else found.number("local_attention") // 2,
        ),
        feed_forward_norm=found.norm(f"{prefix}mlp_norm", f"{gguf}ffn_norm"),
        feed_forward=EncoderNetworkSpec(
            up=up,
            down=Part(f"{prefix}mlp.Wo", f"{gguf}ffn_down", (hidden, inner), bias=of_network),
            activation=found.activation("hidden_activation"),
            gate=gate,
        ),
    )


def _modern(found: EncoderValues) -> EncoderSpec:
    count, every = found.number("num_hidden_layers"), found.number("global_attn_every_n_layers", 3)
    kinds = found.values.get("layer_types") or [SLIDING if index % every else FULL for index in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or not {*map(str, kinds)} <= {FULL, SLIDING}:
        raise found.error("layer_types", f"a list of {count} times {FULL} or {SLIDING}")
    pooling = found.values.get("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise found.error("classifier_pooling", "cls or mean")
    classifier: tuple[DenseSpec, ...] = ()
    if found.labels:
        dense, bias = ("head.dense", "cls", found.number("hidden_size")), found.flag("classifier_bias")
        first = found.dense(*dense, found.activation("classifier_activation"), bias=bias)
        first = replace(first, norm=found.norm("head.norm", "cls.norm"))
        classifier = (first, found.dense("classifier", "cls.output", found.labels))
    return EncoderSpec(
        embedding=Part(
            "embeddings.tok_embeddings", "token_embd", (found.number("vocab_size"), found.number("hidden_size"))
        ),
        embedding_norm=found.norm("embeddings.norm", "token_embd_norm"),
        layers=tuple(_modern_layer(found, index, kind) for index, kind in enumerate(kinds)),
        norm=found.norm("final_norm", "output_norm"),
        head=None,
        classifier=classifier,
        classifier_pooling=pooling,
    )


MODERN_BERT = EncoderFamily(
    names=("ModernBert",),
    model_type="modernbert",
    gguf="modern-bert",
    defaults={
        "vocab_size": 50368,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "norm_bias": False,
        "local_attention": 128,
    },
    aliases={"layer_norm_eps": "norm_eps"},
    spec=_modern,
)

ENCODERS = (BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, DISTILBERT, NOMIC_BERT, MODERN_BERT)


# ---------------------------------------------------------------------------------------------------------------- gemma
# EmbeddingGemma is Gemma 3 with attention to later tokens, too: its window has both sides.


def is_gemma_encoder(values: Mapping[str, Any]) -> bool:
    """Return True for a config.json of Gemma 3 with attention in both directions."""
    return values.get("architectures") == ["Gemma3TextModel"] and values.get("use_bidirectional_attention") is True


def gemma_encoder(values: Mapping[str, Any], **more: Any) -> ModelConfig:
    """Return the configuration of such an encoder. `more` are arguments of `config_from_hf`."""
    values = {**values, "architectures": [GEMMA3.name], "use_bidirectional_attention": False}
    return as_encoder(config_from_hf(values, **more))


def as_encoder(config: ModelConfig) -> ModelConfig:
    """Return a configuration of Gemma 3 with attention in both directions."""
    spec = GEMMA3.spec(config)
    layers = []
    for layer in spec.layers:
        attention, network = layer.attention, layer.feed_forward
        window = attention.heads.window
        fields = vars(attention) | {"heads": replace(attention.heads, window=None)}
        assert isinstance(network, GeGLUSpec)
        layers.append(
            EncoderLayerSpec(
                **vars(layer)
                | {
                    "attention": EncoderAttentionSpec(**fields, reach=None if window is None else window // 2),
                    "feed_forward": EncoderNetworkSpec(
                        up=network.up, down=network.down, activation="gelu_tanh", gate=network.gate
                    ),
                }
            )
        )
    encoder = EncoderSpec(
        embedding=spec.embedding,
        embedding_scale=spec.embedding_scale,
        layers=tuple(layers),
        norm=spec.norm,
        head=None,
    )
    return replace(config, architecture="Gemma3TextModel", tie_word_embeddings=True, encoder=encoder)
