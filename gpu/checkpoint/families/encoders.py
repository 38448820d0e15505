"""The families of encoders. The readers of config.json and of GGUF files pass their values by config.json's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
_HEADS = ("Model", "ForMaskedLM", "ForPreTraining", CLASSIFIER)
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
    """The values of an encoder's header by the names of config.json, with the family's aliases and defaults applied."""

    def __init__(self, values: Mapping[str, Any], family: EncoderFamily, where: str) -> None:
        """`where` names the model and the header in errors."""
        renamed = {name: values[other] for name, other in family.aliases.items() if values.get(other) is not None}
        self.values = {**family.defaults, **{key: value for key, value in values.items() if value is not None}}
        self.values |= renamed
        self.where = where
        self.labels = 0  # of the classification head; 0: no head

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

    def classifier(self, first: DenseSpec, last: str) -> tuple[DenseSpec, ...]:
        """Return the layers of the classification head; none if the model has no head."""
        return (first, self.dense(last, "cls.output", self.labels)) if self.labels else ()


@dataclass(frozen=True)
class EncoderFamily:
    """One family of encoders: aliases and defaults of its config values, and the function that makes its spec."""

    name: str  # prefix of its architectures' names
    model_type: str
    spec: Callable[[EncoderValues], EncoderSpec]
    gguf: str | None = None  # `general.architecture` of GGUF files
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)  # BERT's names of numbers -> the family's
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def encoder_family(values: Mapping[str, Any]) -> tuple[EncoderFamily, str] | None:
    """Return the family and the head of a config.json; None if the model is not an encoder."""
    named = values.get("architectures")
    if named == ["HF_ColBERT"] and values.get("model_type") == BERT.model_type:
        return BERT, "Model"  # `with_colbert` adds the layer for each token
    for architecture in named if isinstance(named, list) else []:
        for family in ENCODERS if isinstance(architecture, str) else ():
            end = architecture.removeprefix(family.name)
            if (
                end in _HEADS
                and end != architecture
                and values.get("model_type", family.model_type) == family.model_type
            ):
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
        architecture=family.name + head,
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
    """Return the configuration with ColBERT's layer, which maps each token to `outputs` values."""
    layer = DenseSpec(weight=Part("linear", "", (outputs, config.hidden_size)), activation="identity")
    return replace(config, encoder=replace(config.encoder, token_dense=(layer,)))


# --------------------------------------------------------------------------------------------------------------- layers
# A family's table maps the role of each weight to its name in checkpoints; in GGUF files all families share the names.


def _table(roles: str, names: str) -> dict[str, str]:
    return dict(zip(roles.split(), names.split(), strict=True))


_IN_GGUF = _table(
    "q k v qkv out up gate gate_up down attention_norm feed_forward_norm attention_sum_norm feed_forward_sum_norm",
    "attn_q attn_k attn_v attn_qkv attn_output ffn_up ffn_gate ffn_up ffn_down attn_norm ffn_norm attn_output_norm "
    "layer_output_norm",
)
_ROLES = "words norm layers q k v out up down attention_sum_norm feed_forward_sum_norm"
_BERT_TABLE = _table(
    _ROLES,
    "embeddings.word_embeddings embeddings.LayerNorm encoder.layer attention.self.query attention.self.key "
    "attention.self.value attention.output.dense intermediate.dense output.dense attention.output.LayerNorm "
    "output.LayerNorm",
)
_DISTILBERT_TABLE = _table(
    _ROLES,
    "embeddings.word_embeddings embeddings.LayerNorm transformer.layer attention.q_lin attention.k_lin "
    "attention.v_lin attention.out_lin ffn.lin1 ffn.lin2 sa_layer_norm output_layer_norm",
)
_NOMIC_TABLE = _table(
    f"{_ROLES} qkv gate",
    "embeddings.word_embeddings emb_ln encoder.layers attn.q_proj attn.k_proj attn.v_proj attn.out_proj mlp.fc11 "
    "mlp.fc2 norm1 norm2 attn.Wqkv mlp.fc12",
)
_MODERN_TABLE = _table(
    "words norm layers q k v qkv out up gate gate_up down attention_norm feed_forward_norm activation",
    "embeddings.tok_embeddings embeddings.norm model.layers attn.q_proj attn.k_proj attn.v_proj attn.Wqkv attn.Wo "
    "mlp.up mlp.gate mlp.Wi mlp.Wo attn_norm mlp_norm hidden_activation",
)
_NO_ROPE = Rope(10000.0, dim=0)


def _spec(
    found: EncoderValues,
    table: Mapping[str, str],
    *,
    biases: tuple[bool, bool] = (True, True),
    ropes: Sequence[tuple[Rope, int | None]] = (),
    **more: Any,
) -> EncoderSpec:
    """Return the spec of a family with this `table` of names. `biases`: whether the matrices of attention, and those of
    the feed-forward network, have a bias. `ropes`: for each layer the RoPE and the reach of its attention in tokens
    (None: all); empty without RoPE."""
    hidden, inner, heads = map(found.number, ("hidden_size", "intermediate_size", "num_attention_heads"))
    shape = Heads(heads, heads, hidden // heads, (hidden // heads) ** -0.5)
    roles = [role for role in table if role in _IN_GGUF]

    def layer(index: int, rope: Rope, reach: int | None) -> EncoderLayerSpec:
        names = {role: (f"{table['layers']}.{index}.{table[role]}", f"blk.{index}.{_IN_GGUF[role]}") for role in roles}
        norms = {role: found.norm(*names[role]) for role in roles if role.endswith("norm")}
        if index == 0 and "attention_norm" in norms:
            del norms["attention_norm"]  # the norm of the embeddings takes its place

        def part(role: str, outputs: int, inputs: int = hidden) -> Part:
            return Part(*names[role], (outputs, inputs), bias=biases[role in ("up", "gate", "down")])

        qkv, up = tuple(part(letter, hidden) for letter in "qkv"), part("up", inner)
        qkv = fused(*names["qkv"], *qkv) if "qkv" in names else qkv
        gate = part("gate", inner) if "gate" in names else None
        if gate is not None and "gate_up" in names:
            gate, up = fused(*names["gate_up"], gate, up)
        down, activation = part("down", hidden, inner), found.activation(table.get("activation", "hidden_act"))
        out = part("out", hidden)
        return EncoderLayerSpec(
            attention=EncoderAttentionSpec(heads=shape, qkv=qkv, out=out, qk_norm=None, rope=rope, reach=reach),
            feed_forward=EncoderNetworkSpec(up=up, down=down, activation=activation, gate=gate),
            **dict.fromkeys(("attention_norm", "feed_forward_norm")) | norms,
        )

    ropes = ropes or [(_NO_ROPE, None)] * found.number("num_hidden_layers")
    return EncoderSpec(
        embedding=Part(table["words"], "token_embd", (found.number("vocab_size"), hidden)),
        embedding_norm=found.norm(table["norm"], "token_embd_norm"),
        layers=tuple(layer(index, *each) for index, each in enumerate(ropes)),
        head=None,
        **{"norm": None} | more,
    )


def _rope(found: EncoderValues, rope: Any, default: float, key: str) -> Rope:
    """Return the RoPE of `rope_parameters`, or with the base under the older `key`."""
    rope = rope if isinstance(rope, dict) else {}
    if rope.get("rope_type", "default") != "default":
        raise ModelError(f"{found.where}: rope_type={shown(rope['rope_type'])} is not supported; it must be default.")
    theta = rope.get("rope_theta", found.values.get(key, default))
    return Rope(float(check_field(FIELDS["rope_theta"], theta, key="rope_theta", source=found.where)))


# ------------------------------------------------------------------------------------------------------------ families


def _bert(
    found: EncoderValues,
    *,
    table: Mapping[str, str] = _BERT_TABLE,
    head: tuple[str, str, str] = ("pooler.dense", "classifier", "tanh"),
    skips_padding: bool = False,
) -> EncoderSpec:
    """BERT and its relatives normalize the residual stream after each addition. `head` has the names of the layers of
    the classification head, and the activation between them."""
    hidden, types = found.number("hidden_size"), found.number("type_vocab_size", 0)
    longest, padding = found.number("max_position_embeddings"), found.number("pad_token_id") if skips_padding else None
    first, last, activation = head
    more: dict[str, Any] = {"positions": Part("embeddings.position_embeddings", "position_embd", (longest, hidden))}
    if table is _NOMIC_TABLE:  # RoPE, gated feed-forward networks, and matrices without biases
        rope = _rope(found, found.values.get("rope_parameters"), 1000.0, "rotary_emb_base")
        more = {"biases": (False, False), "ropes": [(rope, None)] * found.number("num_hidden_layers")}
    return _spec(
        found,
        table,
        first_position=0 if padding is None else padding + 1,
        padding=padding,
        token_types=Part("embeddings.token_type_embeddings", "token_types", (types, hidden)) if types else None,
        classifier=found.classifier(found.dense(first, "cls", hidden, activation), last),
        **more,
    )


def _modern(found: EncoderValues) -> EncoderSpec:
    """ModernBERT (Warner et al., arXiv:2412.13663) normalizes before attention and feed-forward network. Some layers
    have sliding-window attention."""
    count, every = found.number("num_hidden_layers"), found.number("global_attn_every_n_layers", 3)
    kinds = found.values.get("layer_types") or [SLIDING if index % every else FULL for index in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or not {*map(str, kinds)} <= {FULL, SLIDING}:
        raise found.error("layer_types", f"a list of {count} times {FULL} or {SLIDING}")
    pooling, of_kinds = found.values.get("classifier_pooling", "cls"), found.values.get("rope_parameters")
    if pooling not in ("cls", "mean"):
        raise found.error("classifier_pooling", "cls or mean")
    of_kinds = of_kinds if isinstance(of_kinds, dict) else {}
    ropes = {
        FULL: (_rope(found, of_kinds.get(FULL), 160000.0, "global_rope_theta"), None),
        SLIDING: (
            _rope(found, of_kinds.get(SLIDING), 10000.0, "local_rope_theta"), found.number("local_attention") // 2
        ),
    }  # fmt: skip
    classifier: tuple[DenseSpec, ...] = ()
    if found.labels:
        activation, bias = found.activation("classifier_activation"), found.flag("classifier_bias")
        first = found.dense("head.dense", "cls", found.number("hidden_size"), activation, bias)
        classifier = found.classifier(replace(first, norm=found.norm("head.norm", "cls.norm")), "classifier")
    return _spec(
        found,
        _MODERN_TABLE,
        biases=(found.flag("attention_bias"), found.flag("mlp_bias")),
        ropes=[ropes[kind] for kind in kinds],
        norm=found.norm("final_norm", "output_norm"),
        classifier=classifier,
        classifier_pooling=pooling,
    )


def _names(*names: str) -> dict[str, str]:
    """Return the aliases of a family."""
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act")
    return dict(zip((*sizes, "layer_norm_eps", "max_position_embeddings"), names, strict=False))


_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_BERT_DEFAULTS = {
    **dict(zip(_SIZES, (30522, 768, 12, 12, 3072), strict=True)),
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}
_ROBERTA_DEFAULTS = {**_BERT_DEFAULTS, "vocab_size": 50265, "pad_token_id": 1}
_MODERN_DEFAULTS = {
    **dict(zip(_SIZES, (50368, 768, 22, 12, 1152), strict=True)),
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "norm_bias": False,
    "local_attention": 128,
}
_ABSOLUTE = {"position_embedding_type": ("absolute",)}
_OF_ROBERTA = partial(_bert, head=("classifier.dense", "classifier.out_proj", "tanh"))
_NOT_NOMIC = ("prenorm", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "use_rms_norm", "causal", "parallel_block")

BERT = EncoderFamily("Bert", "bert", _bert, gguf="bert", defaults=_BERT_DEFAULTS, allowed=_ABSOLUTE)
# GGUF files of RoBERTa and DistilBERT say BERT, too. Their heads have other activations.
BERT_AS_ROBERTA = replace(BERT, spec=_OF_ROBERTA)
BERT_AS_DISTILBERT = replace(BERT, spec=partial(_bert, head=("pre_classifier", "classifier", "relu")))
ROBERTA = EncoderFamily(
    "Roberta", "roberta", partial(_OF_ROBERTA, skips_padding=True), defaults=_ROBERTA_DEFAULTS, allowed=_ABSOLUTE
)
XLM_ROBERTA = replace(
    ROBERTA, name="XLMRoberta", model_type="xlm-roberta", defaults={**_ROBERTA_DEFAULTS, "vocab_size": 30522}
)
CAMEMBERT = replace(XLM_ROBERTA, name="Camembert", model_type="camembert")
DISTILBERT = EncoderFamily(
    "DistilBert",
    "distilbert",
    partial(_bert, table=_DISTILBERT_TABLE, head=("pre_classifier", "classifier", "relu")),
    defaults={**_BERT_DEFAULTS, "type_vocab_size": 0},
    aliases=_names("dim", "n_layers", "n_heads", "hidden_dim", "activation"),
)
# config.json of the published models has GPT-2's names. RoPE scaling beyond the trained context is refused.
NOMIC_BERT = EncoderFamily(
    "NomicBert",
    "nomic_bert",
    partial(_bert, table=_NOMIC_TABLE),
    gguf="nomic-bert",
    defaults={**_BERT_DEFAULTS, "vocab_size": 30528, "max_position_embeddings": 2048, "hidden_act": "silu"},
    aliases=_names(
        *("n_embd", "n_layer", "n_head", "n_inner", "activation_function", "layer_norm_epsilon"),
        "max_trained_positions",
    ),
    allowed={
        **dict.fromkeys((*_NOT_NOMIC, "rotary_emb_interleaved"), (False,)),
        "rotary_emb_fraction": (1.0,),
        "rotary_scaling_factor": (),
    },
)
MODERN_BERT = EncoderFamily(
    "ModernBert",
    "modernbert",
    _modern,
    gguf="modern-bert",
    defaults=_MODERN_DEFAULTS,
    aliases={"layer_norm_eps": "norm_eps"},
)
ENCODERS = (BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, DISTILBERT, NOMIC_BERT, MODERN_BERT)


# ---------------------------------------------------------------------------------------------------------------- gemma
# EmbeddingGemma is Gemma 3 with bidirectional attention, so its window reaches to both sides.


def is_gemma_encoder(values: Mapping[str, Any]) -> bool:
    """Return True for a config.json of Gemma 3 with bidirectional attention."""
    return values.get("architectures") == ["Gemma3TextModel"] and values.get("use_bidirectional_attention") is True


def gemma_encoder(values: Mapping[str, Any], **more: Any) -> ModelConfig:
    """Return the configuration of Gemma 3 as an encoder. `more` are arguments of `config_from_hf`."""
    values = {**values, "architectures": [GEMMA3.name], "use_bidirectional_attention": False}
    return as_encoder(config_from_hf(values, **more))


def as_encoder(config: ModelConfig) -> ModelConfig:
    """Return a configuration of Gemma 3 with bidirectional attention."""
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
