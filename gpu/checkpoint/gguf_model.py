"""A GGUF file as a `ModelFiles`: names, row order and numbers as in the Hugging Face checkpoint it was made from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from gpu.checkpoint.architecture import Part, Ranges, parts_of
from gpu.checkpoint.config import ModelConfig
from gpu.checkpoint.default_sampling import GGUF_KEYS, default_sampling
from gpu.checkpoint.embedder import embedder_of_gguf
from gpu.checkpoint.families import spec_of
from gpu.checkpoint.gguf_config import config_from_gguf
from gpu.checkpoint.gguf_file import GGUFFile, GGUFTensor
from gpu.checkpoint.gguf_tokenizer import special_tokens_from_gguf, tokenizer_from_gguf
from gpu.checkpoint.header_fields import check_chat_template
from gpu.checkpoint.model_files import ModelFiles
from gpu.checkpoint.quantized_rows import QuantizedRows
from gpu.checkpoint.slices import sliced
from gpu.checkpoint.tensors import check_shapes

T = TypeVar("T", bound=np.generic)

_PLAIN: dict[str, type[np.generic]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_IN_THE_CONFIG = "rope_freqs.weight"  # a tensor that gguf_config reads


def open_gguf(path: Path, *, name: str) -> ModelFiles:
    """Open a GGUF file. Raises `ModelError` if it is damaged or holds what cannot be run."""
    file = GGUFFile(path)
    config = config_from_gguf(file)
    shapes = ((name, tensor.shape[expert is not None :]) for name, tensor, _, expert in _named(file, config))
    check_shapes(shapes, config, source=path.name)
    template = file.metadata.get("tokenizer.chat_template")
    pooling = f"{file.require('general.architecture', str)}.pooling_type"
    return ModelFiles(
        name=name,
        config=config,
        chat_template=check_chat_template(template, key="metadata tokenizer.chat_template", source=path.name),
        special_tokens=special_tokens_from_gguf(file),
        load_tokenizer=partial(tokenizer_from_gguf, file, config.vocab_size),
        tensors=file,
        embedder=embedder_of_gguf(file.metadata.get(pooling), f"metadata {pooling}", path.name),
        load_sampling=partial(default_sampling, file.metadata.get, GGUF_KEYS, path.name),
    )


def unpermute_rows(rows: npt.NDArray[T], num_heads: int) -> npt.NDArray[T]:
    """Undo the row order that GGUF files keep q and k of Llama models in.

    [num_heads * head_dim, ...] -> the same shape, of numbers or of the blocks that rows are quantized to.
    Hugging Face's RoPE turns element i of a head with element i + head_dim / 2; ggml's turns neighbours, so the
    converter interleaves the two halves of each head. (Qwen's RoPE is of the first kind in both, and is left alone.)
    """
    head_dim = rows.shape[0] // num_heads
    return rows.reshape(num_heads, head_dim // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def read_tensors(
    file: GGUFFile, config: ModelConfig, ranges: Mapping[str, Ranges | None]
) -> Iterator[tuple[str, npt.NDArray[Any] | QuantizedRows]]:
    """Yield the tensors of an opened file as they are there, `gpu.weights.Weight`s: quantized, or in their type. Only
    those that `ranges` names, and of these no more than it says."""
    for name, tensor, num_heads, expert in _named(file, config):
        if name not in ranges:
            continue
        dtype, packed, shape = _PLAIN.get(tensor.type.name), file.packed(tensor.name), tensor.shape
        if expert is not None:
            packed, shape = packed[expert], shape[1:]
        whole = QuantizedRows(tensor.type.name, shape, packed) if dtype is None else packed.view(dtype)
        weight = sliced(whole, ranges[name])
        if num_heads:  # of which a part has some, whole
            heads = num_heads * weight.shape[0] // shape[0]
            if isinstance(weight, QuantizedRows):
                weight = replace(weight, data=unpermute_rows(weight.data, heads))
            else:
                weight = unpermute_rows(weight, heads)
        yield name, weight


def _named(file: GGUFFile, config: ModelConfig) -> Iterator[tuple[str, GGUFTensor, int, int | None]]:
    """Each tensor with its Hugging Face name, blk.3.attn_q.weight as model.layers.3.self_attn.q_proj.weight, and how
    many heads' rows lie in ggml's order; one that holds a matrix of every expert as many times, with the expert. One
    that the model does not have, or for another number of experts, keeps its name."""
    parts: dict[str, list[Part]] = defaultdict(list)
    for part in parts_of(spec_of(config)):
        parts[part.gguf].append(part)
    for name, tensor in file.tensors.items():
        stem, _, kind = name.rpartition(".")
        of_experts = stem in parts and parts[stem][0].expert is not None
        if stem in parts and not (of_experts and tensor.shape[0] != len(parts[stem])):
            for part in parts[stem]:
                in_hf = part.weight_name if kind == "weight" else f"{part.name}.{kind}"
                yield in_hf, tensor, part.gguf_heads, part.expert
        elif name != _IN_THE_CONFIG:
            yield name, tensor, 0, None
