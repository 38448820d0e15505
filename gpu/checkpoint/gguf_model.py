"""A GGUF file as a `ModelFiles`: names, row order and numbers as in the Hugging Face checkpoint it was made from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from gpu.checkpoint.config import ModelConfig
from gpu.checkpoint.gguf_config import config_from_gguf
from gpu.checkpoint.gguf_file import UNQUANTIZED_TYPES, GGUFFile
from gpu.checkpoint.gguf_tokenizer import special_tokens_from_gguf, tokenizer_from_gguf
from gpu.checkpoint.header_fields import check_chat_template
from gpu.checkpoint.model_files import ModelFiles
from gpu.checkpoint.quantized_rows import QuantizedRows
from gpu.checkpoint.tensors import check_shapes

T = TypeVar("T", bound=np.generic)

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_NAME = re.compile(r"(blk\.(?P<layer>\d+)\.)?(?P<stem>\w+)\.(?P<kind>\w+)", re.ASCII)
_IN_THE_CONFIG = "rope_freqs.weight"  # a tensor that gguf_config reads


def open_gguf(path: Path, *, name: str) -> ModelFiles:
    """Open a GGUF file. Raises `ModelError` if it is damaged or holds what cannot be run."""
    file = GGUFFile(path)
    config = config_from_gguf(file)
    shapes = ((hf_tensor_name(name), tensor.shape) for name, tensor in file.tensors.items() if name != _IN_THE_CONFIG)
    check_shapes(shapes, config, source=path.name)
    template = file.metadata.get("tokenizer.chat_template")
    return ModelFiles(
        name=name,
        config=config,
        chat_template=check_chat_template(template, key="metadata tokenizer.chat_template", source=path.name),
        special_tokens=special_tokens_from_gguf(file),
        load_tokenizer=partial(tokenizer_from_gguf, file, config.vocab_size),
        tensors=file,
    )


def hf_tensor_name(gguf_name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight. A name that is not known comes back as it is."""
    parts = _GGUF_NAME.fullmatch(gguf_name)
    if parts is None or parts["stem"] not in _NAMES:
        return gguf_name
    prefix = "" if parts["layer"] is None else f"model.layers.{parts['layer']}."
    return f"{prefix}{_NAMES[parts['stem']]}.{parts['kind']}"


def unpermute_rows(rows: npt.NDArray[T], num_heads: int) -> npt.NDArray[T]:
    """Undo the row order that GGUF files keep q and k of Llama models in.

    [num_heads * head_dim, ...] -> the same shape, of numbers or of the blocks that rows are quantized to.
    Hugging Face's RoPE turns element i of a head with element i + head_dim / 2; ggml's turns neighbours, so the
    converter interleaves the two halves of each head. (Qwen's RoPE is of the first kind in both, and is left alone.)
    """
    head_dim = rows.shape[0] // num_heads
    return rows.reshape(num_heads, head_dim // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def read_tensors(file: GGUFFile, config: ModelConfig) -> Iterator[tuple[str, npt.NDArray[np.float32] | QuantizedRows]]:
    """Yield the tensors of an opened file, matrices as they are quantized there. Of the file nothing stays in this
    process's memory after the last one."""
    permuted_heads: dict[str, int] = {}
    if config.architecture == "LlamaForCausalLM":
        permuted_heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in file.tensors.items():
        if name == _IN_THE_CONFIG:
            continue
        num_heads = permuted_heads.get(name.split(".")[-2])  # names and shapes have been checked
        if tensor.type not in UNQUANTIZED_TYPES and len(tensor.shape) == 2:
            packed = file.packed(name) if num_heads is None else unpermute_rows(file.packed(name), num_heads)
            rows, columns = tensor.shape
            yield hf_tensor_name(name), QuantizedRows(tensor.type.name, (rows, columns), packed)
            continue
        values = file.read(name)
        yield hf_tensor_name(name), values if num_heads is None else unpermute_rows(values, num_heads)
    file.release_pages()
