"""A GGUF file as `ModelFiles`."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.checkpoint.architecture import Architecture, Part, Ranges, parts_of
from gpu.checkpoint.config import (
    FIELDS,
    HeaderField,
    ModelConfig,
    ModelError,
    Numbers,
    RopeScaling,
    check_chat_template,
    check_field,
    every_nth,
    shown,
)
from gpu.checkpoint.embedder import embedder_of_gguf
from gpu.checkpoint.encoder import DenseSpec
from gpu.checkpoint.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from gpu.checkpoint.families.dense import GRANITE, OLMO2, OLMO3
from gpu.checkpoint.families.encoders import (
    BERT,
    BERT_AS_DISTILBERT,
    BERT_AS_ROBERTA,
    CLASSIFIER,
    ENCODERS,
    MODERN_BERT,
    EncoderFamily,
    as_encoder,
    encoder_config,
)
from gpu.checkpoint.families.gemma import GEMMA3, GEMMA3N, GEMMA4, values_of_gguf
from gpu.checkpoint.families.hybrid import GRANITE_4, LFM2_MOE
from gpu.checkpoint.families.qwen_hybrid import QWEN3_5_MOE, QWEN3_NEXT, SORTED, TILED
from gpu.checkpoint.families.table import FAMILIES, LLAMA, MIXTRAL, spec_of
from gpu.checkpoint.gguf_file import GGUFFile, GGUFTensor
from gpu.checkpoint.gguf_tokenizer import special_tokens_from_gguf, tokenizer_from_gguf
from gpu.checkpoint.hf_config import FULL, LINEAR, SLIDING, check_config, config_from_hf, linear_or_yarn, longrope
from gpu.checkpoint.model_files import GGUF_KEYS, ModelFiles, default_sampling
from gpu.checkpoint.quantized_rows import QuantizedRows
from gpu.checkpoint.scorer import QWEN3_RERANKER, Scorer, named_reranker, scorer_of_labels
from gpu.checkpoint.tensors import Weight, check_shapes, reordered, rows_of, sliced

_PLAIN: dict[str, type[np.generic]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def open_gguf(path: Path, *, name: str) -> ModelFiles:
    """Open a GGUF file. Raises `ModelError` if it is damaged or its model is not supported."""
    file = GGUFFile(path)
    config = config_from_gguf(file)
    is_encoder = config.encoder is not None
    pooling = f"{file.require('general.architecture', str)}.pooling_type"
    pooled, scorer = file.metadata.get(pooling), _scorer(file, config, name)
    pooled = None if scorer is not None and pooled == _RANK else pooled
    embedder = embedder_of_gguf(pooled, f"metadata {pooling}", path.name, is_encoder=is_encoder)
    if is_encoder:
        dense = {name: file.tensors[f"{name}.weight"].shape for name in _DENSE if f"{name}.weight" in file.tensors}
        layers = {
            name: DenseSpec(weight=Part(name, name, shape), activation="identity") for name, shape in dense.items()
        }
        config = replace(embedder, dense=layers).completed(config)
    shapes = ((name, _shape(tensor, part)) for name, tensor, part in _named(file, config))
    check_shapes(shapes, config, source=path.name)
    template = file.metadata.get("tokenizer.chat_template")
    return ModelFiles(
        name=name,
        config=config,
        chat_template=check_chat_template(template, key="metadata tokenizer.chat_template", source=path.name),
        special_tokens=special_tokens_from_gguf(file),
        load_tokenizer=partial(tokenizer_from_gguf, file, config.vocab_size),
        tensors=file,
        embedder=embedder,
        scorer=scorer,
        load_sampling=partial(default_sampling, file.metadata.get, GGUF_KEYS, path.name),
    )


def read_tensors(
    file: GGUFFile, config: ModelConfig, ranges: Mapping[str, Ranges | None]
) -> Iterator[tuple[str, Weight]]:
    """Yield the tensors that `ranges` names, restricted to their ranges; quantized, or in the type of the file."""
    for name, tensor, part in _named(file, config):
        if name not in ranges:
            continue
        if tensor.name.endswith(_TO_VALUES):
            yield name, sliced(_from_latents(file, tensor.name), ranges[name])
            continue
        dtype, packed = _PLAIN.get(tensor.type.name), file.packed(tensor.name)
        if part is not None and part.expert is not None:
            packed = packed[part.expert]
        if part is not None and _is_fused(part):
            packed = packed[part.rows] if dtype is None or len(tensor.shape) > 1 else packed.view(dtype)[part.rows]
        shape = _shape(tensor, part)
        whole = QuantizedRows(tensor.type.name, shape, packed) if dtype is None else packed.view(dtype).reshape(shape)
        weight = sliced(whole, ranges[name])
        if part is not None and part.gguf.endswith(_DECAYS):
            assert isinstance(weight, np.ndarray)
            weight = np.log(-weight)
        yield name, weight if part is None else reordered(weight, part.gguf_order)


# Tensors that files of Gemma 3n and 4 also have for layers that read the keys and values of others.
_OF_READERS = {
    "attn_k.weight": "k_proj.weight",
    "attn_v.weight": "v_proj.weight",
    "attn_k_norm.weight": "k_norm.weight",
}
_TO_KEYS, _TO_VALUES = ".attn_k_b.weight", ".attn_v_b.weight"  # together, the matrix from latents of DeepSeek


def _from_latents(file: GGUFFile, of_values: str) -> npt.NDArray[np.float32]:
    """Return the matrix from latents to each head's key and value, which a file has as [heads, latents, key] and
    [heads, value, latents]."""
    keys, values = file.read(of_values.replace(_TO_VALUES, _TO_KEYS)), file.read(of_values)
    return np.concatenate((keys.swapaxes(1, 2), values), 1).reshape(-1, values.shape[2])


def _is_fused(part: Part) -> bool:
    return part.stack is not None and part.stack.in_gguf


def _shape(tensor: GGUFTensor, part: Part | None) -> tuple[int, ...]:
    if part is None:
        return tensor.shape
    shape = tensor.shape if part.expert is None else tensor.shape[1:]
    if _is_fused(part):
        shape = part.shape[:1] + shape[1:]
    # Converters add and leave out dimensions of 1.
    are_same = [size for size in part.shape if size > 1] == [size for size in shape if size > 1]
    return part.shape if are_same else shape


def _named(file: GGUFFile, config: ModelConfig) -> Iterator[tuple[str, GGUFTensor, Part | None]]:
    """Yield the Hugging Face name, the tensor and the part of each weight; a tensor with several parts comes once for
    each. A tensor that is not in the model, or has another number of parts, keeps its GGUF name."""
    parts: dict[str, list[Part]] = defaultdict(list)
    for part in parts_of(spec_of(config)):
        parts[part.gguf].append(part)
    for name, tensor in file.tensors.items():
        stem, _, kind = name.rpartition(".")
        if name.endswith((_TO_KEYS, _TO_VALUES)) and (whole := parts.get(f"{stem[:-3]}kv_b")):
            keys = file.tensors.get(name.replace(_TO_VALUES, _TO_KEYS))
            if name.endswith(_TO_VALUES) and keys is not None and len(tensor.shape) == len(keys.shape) == 3:
                shape = (tensor.shape[0] * (keys.shape[2] + tensor.shape[1]), tensor.shape[2])
                fits = keys.shape[:2] == (tensor.shape[0], tensor.shape[2])
                yield whole[0].weight_name, replace(tensor, shape=shape if fits else tensor.shape), whole[0]
            continue
        if name in parts:  # a vector without a suffix, or a bias without a matrix
            stem, kind = name, "weight"
        found = parts.get(stem, [])
        several = rows_of(found) if len(found) > 1 else None
        if found and found[0].expert is not None:
            several = len({part.expert for part in found})
        if found and several in (None, tensor.shape[0]):
            for part in found:
                is_whole = kind == "weight" or part.suffix == f"_{kind}"
                yield part.weight_name if is_whole else f"{part.name}.{kind}", tensor, part
        elif (layer := _LAYER.match(name)) and f"{layer[0].removesuffix('nextn.')}nextn.eh_proj.weight" in file.tensors:
            yield f"model.layers.{layer[1]}.{name[layer.end() :]}", tensor, None
        elif layer and name[layer.end() :] in _OF_READERS:
            yield f"model.layers.{layer[1]}.self_attn.{_OF_READERS[name[layer.end() :]]}", tensor, None
        elif name not in (_ROPE_FREQUENCIES, *_ROPE_DIVISORS.values(), _SCORES):  # which are read elsewhere
            yield name, tensor, None


def _scorer(file: GGUFFile, config: ModelConfig, name: str) -> Scorer | None:
    """Return the scorer of a classifier or reranker; None for another model. Raises `ModelError`.

    Files of decoders that rerank have two rows of the head apart, those of "yes" and of "no". Of a head that is not
    tied to the embedding, they lack all others.
    """
    architecture = file.require("general.architecture", str)
    if _SCORES not in file.tensors:
        return named_reranker(f"{name} {file.metadata.get('general.name')}", architecture)
    key, count = f"{architecture}.classifier.output_labels", file.tensors[_SCORES].shape[0]
    labels = file.require_array(key, str) if key in file.metadata else [f"LABEL_{each}" for each in range(count)]
    if len(labels) != count:
        raise ModelError(f"{file.path.name}: {key} has {len(labels)} labels, the head has {count}. Convert it anew.")
    if config.encoder is not None and config.encoder.classifier:
        return scorer_of_labels(tuple(labels))
    head = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
    tokens, rows = file.require_array("tokenizer.ggml.tokens", str), file.read(_SCORES)
    if architecture == "qwen3" and labels == ["yes", "no"] and set(labels) <= set(tokens):
        own = [file.read(head, slice(tokens.index(label), tokens.index(label) + 1))[0] for label in labels]
        if rows.shape == (2, len(own[0])) and all(map(_are_near, rows, own)):
            return QWEN3_RERANKER
    raise ModelError(
        f"{file.path.name} has scores ({_SCORES}) that are not supported: of decoders, only those of Qwen3-Reranker "
        'are, with the rows of "yes" and "no" of the whole head. Serve the Hugging Face directory of the model.'
    )


def _are_near(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> bool:
    """Return True for the same row in two quantizations."""
    return bool(one @ other > 0.9 * np.sqrt(one @ one * (other @ other)))


# ---------------------------------------------------------------------------------------------------------- gguf config


GGUF_FAMILIES = {family.gguf: family for family in FAMILIES.values() if family.gguf is not None}
_GEMMA_ENCODER = "gemma-embedding"
GGUF_FAMILIES[_GEMMA_ENCODER] = GEMMA3
GGUF_ENCODERS = {family.gguf: family for family in ENCODERS if family.gguf is not None}
_DENSE = ("dense_2", "dense_3")  # layers after pooling
_SCORES = "cls.output.weight"  # the last layer of a classification head, with a row for each label
_RANK = 4  # `pooling_type` of models with a head
_HEAD_POOLING = {1: "mean", 2: "cls"}
_ENCODER_KEYS = {  # names in config.json -> keys
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "hidden_activation": "hidden_activation",
    "local_attention": "attention.sliding_window",
    "global_attn_every_n_layers": "attention.sliding_window_pattern",
}
_ENCODER_ROPE = {"rotary_emb_base": "freq_base", "global_rope_theta": "freq_base", "local_rope_theta": "freq_base_swa"}

_LAYER = re.compile(r"blk\.(\d{1,5})\.(nextn\.)?")
_UNSORTED = ".ssm_in.weight"  # Qwen3-Next's as older converters left it
_DECAYS = ".ssm_a"  # stored as -exp(A_log)
_ROPE_FREQUENCIES = "rope_freqs.weight"
_ROPE_DIVISORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """Return the configuration of the model in `file`. Raises `ModelError` if it is incomplete or not supported."""
    architecture = file.require("general.architecture", str)
    if architecture in GGUF_ENCODERS:
        return _encoder_config(file, GGUF_ENCODERS[architecture])
    if architecture not in GGUF_FAMILIES:
        raise ModelError(
            f"{file.path.name} holds a model of architecture {shown(architecture)}; supported in GGUF files are "
            f"{', '.join([*GGUF_FAMILIES, *GGUF_ENCODERS])}. More are served from a Hugging Face directory."
        )
    family = GGUF_FAMILIES[architecture]
    has_experts = any(field.gguf == "expert_count" for field in family.numbers.values())
    if not has_experts and file.get(f"{architecture}.expert_count", int, 0) != 0:
        if architecture != LLAMA.gguf:
            raise ModelError(f"{file.path.name} holds a mixture of experts of {architecture}, which is not supported.")
        family = MIXTRAL
    if family is OLMO2 and file.get(f"{architecture}.attention.sliding_window", int, 0) != 0:
        family = OLMO3
    if family in (DEEPSEEK_V3, LFM2_MOE, QWEN3_NEXT, QWEN3_5_MOE):
        is_sigmoid = any(name.endswith("exp_probs_b.bias") for name in file.tensors)
        family = DEEPSEEK_V2 if family is DEEPSEEK_V3 and not is_sigmoid else family
        if file.get(f"{architecture}.expert_gating_func", int, 1 + is_sigmoid) != 1 + is_sigmoid:
            raise ModelError(f"{file.path.name}: expert_gating_func contradicts exp_probs_b.bias. Convert it anew.")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path.name} has no tensor token_embd.weight: it holds no language model.")
    if family in (GEMMA3N, GEMMA4):
        config = config_from_hf(values_of_gguf(file, family), eos_token_ids=_eos_token_ids(file), source=file.path.name)
        return replace(config, bos_token_id=file.get("tokenizer.ggml.bos_token_id", int))

    def find(_: str, field: HeaderField) -> tuple[object, str]:
        key = f"{architecture}.{field.gguf}"
        if key not in file.metadata:  # as files of DeepSeek were before their keys and values were apart
            key = key.removesuffix("_mla")
        value = file.metadata.get(key)
        if key == kv_heads and isinstance(value, list):  # by layer: those with a state have none
            value = max(value, default=0)
        if value is None and field is FIELDS["intermediate_size"]:
            value = family.defaults.get("intermediate_size")
        return value, f"metadata {key}"

    kv_heads = f"{architecture}.{FIELDS['num_key_value_heads'].gguf}"
    numbers = Numbers(find, source=file.path.name, own=family.numbers)
    sizes, own = numbers.sizes(), numbers.own()
    if family is GRANITE_4:
        _complete_granite_4(file, sizes, own)
    head_dim, num_layers = sizes["head_dim"], _layers_before_drafts(file, sizes)
    rotary_dim = file.get(f"{architecture}.rope.dimension_count", int, head_dim)
    if of_delta_nets := "linear_num_key_heads" in own:
        _complete_delta_nets(file, own, head_dim)
    for key, size in (("attention.value_length", None), ("rope.dimension_count", rotary_dim)):
        may_differ = "kv_lora_rank" in family.numbers or (
            size is not None and (family.partial_rotary or of_delta_nets) and 0 <= size <= head_dim
        )
        if not may_differ and file.get(f"{architecture}.{key}", int, head_dim) != head_dim:
            raise ModelError(
                f"{file.path.name}: {architecture}.{key} other than the head's size {head_dim} is not supported."
            )

    rope_theta = numbers.number("rope_theta", 10000.0)
    has_rope = family not in (GRANITE, GRANITE_4) or file.get(f"{architecture}.rope.scaling.finetuned", bool, True)
    has_window = file.get(f"{architecture}.attention.sliding_window", int, 0) != 0
    kinds: tuple[str, ...] = _state_layers(file, numbers, num_layers, family) if family.state_layers else ()
    if has_window and family.full_layers:
        kinds = _layer_types(file, numbers, num_layers, family)
    vocab_size = file.tensors["token_embd.weight"].shape[0]
    config = ModelConfig(
        **sizes,
        architecture=family.name,
        vocab_size=check_field(
            FIELDS["vocab_size"], vocab_size, key="the number of rows of token_embd.weight", source=file.path.name
        ),
        rms_norm_eps=_shortest(numbers.number("rms_norm_eps")),
        rope_theta=rope_theta,
        rope_scaling=_rope_scaling(file, numbers, rope_theta, head_dim, family),
        rotary_dim=None if rotary_dim == head_dim or of_delta_nets else rotary_dim,
        layers_without_rope=every_nth(num_layers, family.no_rope_interval if has_rope else 1),
        tie_word_embeddings="output.weight" not in file.tensors,
        torch_dtype="bfloat16",  # files do not record it; most were rounded from bfloat16
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm=of_delta_nets or "blk.0.attn_q_norm.weight" in file.tensors,
        sliding_window=numbers.integer("sliding_window") if has_window else None,
        layer_types=kinds,
        eos_token_ids=_eos_token_ids(file),
        bos_token_id=file.get("tokenizer.ggml.bos_token_id", int),
        numbers=own,
    )
    config = family.complete(config, {}, file.path.name)
    check_config(config, source=file.path.name)
    return as_encoder(config) if architecture == _GEMMA_ENCODER else config


def _encoder_config(file: GGUFFile, family: EncoderFamily) -> ModelConfig:
    """Return the configuration of an encoder. Raises `ModelError` for a classification head of which a part is missing.
    Files of RoBERTa and DistilBERT say BERT; only DistilBERT has no types of tokens."""
    keys = _ENCODER_KEYS | {name: f"rope.{key}" for name, key in _ENCODER_ROPE.items()}
    values = {name: file.metadata.get(f"{family.gguf}.{key}") for name, key in keys.items()}
    if isinstance(eps := values["layer_norm_eps"], float):
        values["layer_norm_eps"] = _shortest(eps)
    tensors, head = file.tensors, "Model"
    for name, tensor in (("vocab_size", "token_embd.weight"), ("type_vocab_size", "token_types.weight")):
        values[name] = tensors[tensor].shape[0] if tensor in tensors else 0
    flags = {"attention_bias": "blk.0.attn_qkv", "norm_bias": "token_embd_norm", "mlp_bias": "blk.0.ffn_up"}
    values |= {name: f"{tensor}.bias" in tensors for name, tensor in flags.items()}
    if _SCORES in tensors or "cls.weight" in tensors:
        key, head = f"{family.gguf}.classifier.pooling_type", CLASSIFIER
        pooling = _HEAD_POOLING.get(file.get(key, int) or 0)
        is_whole = {_SCORES, "cls.weight"} <= tensors.keys() and (pooling is not None or family is not MODERN_BERT)
        if family not in (BERT, MODERN_BERT) or not is_whole:
            raise ModelError(
                f"{file.path.name} has a part of a classification head: converters leave out the pooler of BERT's, and "
                f"older ones {key} of ModernBERT's. Serve the Hugging Face directory of the model, or convert it anew."
            )
        values |= {"classifier_pooling": pooling, "classifier_bias": "cls.bias" in tensors}
        values["num_labels"] = tensors[_SCORES].shape[0]
        if family is BERT:
            family = BERT_AS_ROBERTA if "token_types.weight" in tensors else BERT_AS_DISTILBERT
    ends = [file.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "seperator")]
    return encoder_config(
        family,
        head,
        values,
        where=f"{file.path.name}, metadata of {family.gguf}",
        torch_dtype="float32",
        eos_token_ids=tuple(dict.fromkeys(each for each in ends if each is not None)),
    )


def _eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    return tuple(dict.fromkeys(token for key in _EOS_KEYS if (token := file.get(key, int)) is not None))


def _complete_granite_4(file: GGUFFile, sizes: dict[str, Any], own: dict[str, int | float]) -> None:
    """Read what Granite 4's files have in another form: sizes of its networks and of Mamba's heads."""
    architecture, field = file.require("general.architecture", str), FIELDS["intermediate_size"]
    keys = (f"{architecture}.expert_shared_feed_forward_length", f"{architecture}.ssm.inner_size")
    shared, inner = (
        check_field(field, file.metadata.get(key), key=f"metadata {key}", source=file.path.name) for key in keys
    )
    sizes["intermediate_size"], own["mamba_expand"] = shared, inner // sizes["hidden_size"]
    own["num_experts"] = file.get(f"{architecture}.expert_count", int) or 0


def _complete_delta_nets(file: GGUFFile, own: dict[str, int | float], head_dim: int) -> None:
    """Read what files of Qwen's hybrids have in another form than config.json."""
    architecture, name = file.require("general.architecture", str), file.path.name
    inner, heads = file.require(f"{architecture}.ssm.inner_size", int), int(own["linear_num_value_heads"])
    rotary = file.require(f"{architecture}.rope.dimension_count", int)
    if inner % heads or not 0 < inner // heads <= QWEN3_NEXT.numbers["linear_value_head_dim"].high:
        raise ModelError(f"{name}: metadata {architecture}.ssm.inner_size ({inner}) does not fit {heads} value heads.")
    if not 0 < rotary <= head_dim:
        key = f"metadata {architecture}.rope.dimension_count"
        raise ModelError(f"{name}: {key} must be from 1 to the head's size {head_dim}, got {rotary}.")
    own |= {"linear_value_head_dim": inner // heads, "partial_rotary_factor": rotary / head_dim}
    is_next = architecture == QWEN3_NEXT.gguf
    if is_next and not any(tensor.endswith(_UNSORTED) for tensor in file.tensors):
        own[SORTED] = 1
    elif not is_next and heads != own["linear_num_key_heads"]:
        own[TILED] = 1


def _layers_before_drafts(file: GGUFFile, sizes: dict[str, Any]) -> int:
    """Return the number of layers, without those that predict further tokens."""
    key, layers = f"{file.require('general.architecture', str)}.nextn_predict_layers", sizes["num_hidden_layers"]
    field = HeaderField(int, 0, layers - 1, "layers")
    sizes["num_hidden_layers"] -= check_field(field, file.metadata.get(key, 0), key=key, source=file.path.name)
    return int(sizes["num_hidden_layers"])


def _state_layers(file: GGUFFile, numbers: Numbers, num_layers: int, family: Architecture) -> tuple[str, ...]:
    """Return which layers have keys and values: those with KV heads. In Qwen's hybrids, those that are not listed as
    recurrent, or without a list every n-th."""
    architecture = file.require("general.architecture", str)
    key, total = f"{architecture}.{FIELDS['num_key_value_heads'].gguf}", numbers.integer("num_hidden_layers")
    have_keys = file.metadata.get(key)
    if "linear_num_key_heads" in family.numbers:
        key = f"{architecture}.attention.recurrent_layers"
        full = every_nth(total, numbers.integer("full_attention_interval", 4))
        have_keys = [index in full for index in range(total)]
        if key in file.metadata:
            have_keys = [not has_state for has_state in file.require_array(key, bool)]
    if not isinstance(have_keys, list):
        return ()
    if len(have_keys) != total or not any(have_keys[:num_layers]):
        raise ModelError(
            f"{file.path.name}: {key} must have an entry for each of {total} layers, of which at least one has keys, "
            f"got {shown(have_keys)}."
        )
    return tuple(FULL if has_keys else LINEAR for has_keys in have_keys[:num_layers])


def _layer_types(file: GGUFFile, numbers: Numbers, num_layers: int, family: Architecture) -> tuple[str, ...]:
    """Return which layers have a window: the file lists them or gives an interval; else the family decides."""
    key = f"{file.require('general.architecture', str)}.attention.sliding_window_pattern"
    named = file.metadata.get(key)
    if not isinstance(named, list):
        return ModelConfig.alternating(num_layers, numbers.integer("sliding_window_pattern", family.full_layers))
    if len(named) != num_layers:
        raise ModelError(f"{file.path.name}: {key} must have {num_layers} entries, one per layer, got {shown(named)}.")
    return tuple(SLIDING if has_window else FULL for has_window in named)


def _shortest(value: float) -> float:
    """Return the shortest decimal of the same float32: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(
    file: GGUFFile, numbers: Numbers, rope_theta: float, head_dim: int, family: Architecture
) -> RopeScaling | None:
    if _ROPE_FREQUENCIES in file.tensors:
        return _llama3_scaling(file, rope_theta, head_dim)
    architecture = file.require("general.architecture", str)
    if all(name in file.tensors for name in _ROPE_DIVISORS.values()):
        divisors = {key: file.read(name).ravel().tolist() for key, name in _ROPE_DIVISORS.items()}
        longest = numbers.integer("max_position_embeddings")
        return longrope(numbers, longest, divisors, file.path.name, "longrope_attention_factor")
    kind = file.get(f"{architecture}.rope.scaling.type", str, "none")
    if kind == "none":
        return None
    if kind in ("linear", "yarn"):
        scaling = linear_or_yarn(kind, numbers, truncate=family.yarn_truncate, mscale=1.0)
        beta = numbers.number("llama_4_scaling_beta", 0.0) if family.query_scaling else 0.0
        return replace(scaling, query_beta=beta)
    raise ModelError(
        f"{file.path.name}: RoPE scaling {shown(kind)} is not supported; supported are linear, yarn and Llama 3's."
    )


def _llama3_scaling(file: GGUFFile, rope_theta: float, head_dim: int) -> RopeScaling:
    """Return Llama 3's scaling from the divisors of the frequencies, because converters store nothing else. All Llama
    3.x differ only in the largest divisor; the others are checked."""
    if file.tensors[_ROPE_FREQUENCIES].shape == (head_dim // 2,):
        divisors = file.read(_ROPE_FREQUENCIES)
        factor = check_field(
            FIELDS["factor"], float(divisors.max()), key=f"the largest of {_ROPE_FREQUENCIES}", source=file.path.name
        )
        scaling = RopeScaling(rope_type="llama3", factor=factor)
        if np.allclose(divisors, _llama3_divisors(scaling, rope_theta, head_dim), rtol=1e-4):
            return scaling
    raise ModelError(
        f"{file.path.name}: {_ROPE_FREQUENCIES} is not Llama 3's RoPE scaling, the only one that is supported."
    )


def _llama3_divisors(scaling: RopeScaling, rope_theta: float, head_dim: int) -> list[float]:
    """Return the divisors of the head_dim / 2 inverse frequencies: `factor` for long wavelengths, 1 for short ones, and
    in between its inverse is linear in original context / wavelength (Llama 3.1's `apply_scaling`)."""
    divisors = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * rope_theta ** (2 * index / head_dim)
        turns = scaling.original_max_position_embeddings / wavelength
        smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = min(max(smooth, 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return divisors
