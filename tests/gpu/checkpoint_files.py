"""Writes small models in the formats that Headrace reads, with the `gguf` library as the independent hand."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from gpu.checkpoint import ModelConfig
from gpu.checkpoint.tensors import tensor_shapes
from tests.gpu.k_quants import quantize

TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=256,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=128,
    rope_theta=500000.0,
    eos_token_ids=(2,),
    bos_token_id=1,
)

_GGUF_NAMES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
_GGUF_NAMES |= {"Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3", "MixtralForCausalLM": "llama"}
_GGUF_NAMES |= {"Qwen3MoeForCausalLM": "qwen3moe", "GptOssForCausalLM": "gpt-oss"}


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in tensor_shapes(config).items()}


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in the order of the bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_in = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [stand_in[byte] for byte in range(256)]


ALPHABET = [*byte_alphabet(), "th"]  # the least that a vocabulary with a merge can be


class TinyGGUF:
    """A GGUF file in the making: complete and valid, until a test changes `writer` before `save`."""

    def __init__(self, path: Path, config: ModelConfig = TINY) -> None:
        self.path = path
        self.config = config
        self.name = _GGUF_NAMES[config.architecture]
        self.architecture = getattr(gguf.MODEL_ARCH, self.name.upper().replace("-", "_"))
        self.writer = writer = gguf.GGUFWriter(str(path), self.name)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_theta)
        writer.add_eos_token_id(2)
        writer.add_bos_token_id(1)

    def add_tokenizer(self, *, kind="gpt2", pre="smollm", tokens=None, types=None, merges=("t h",)) -> "TinyGGUF":
        tokens = tokens or ALPHABET
        self.writer.add_tokenizer_model(kind)
        self.writer.add_tokenizer_pre(pre)
        self.writer.add_token_list(tokens)
        self.writer.add_token_types(types or [1] * len(tokens))
        self.writer.add_token_merges(list(merges))
        return self

    def add_weights(
        self, weights: dict[str, np.ndarray], quantization: str | Callable[[str], str] = "F32"
    ) -> "TinyGGUF":
        """Add tensors as llama.cpp's converter does: matrices quantized, by name if need be, q and k permuted."""
        names = gguf.get_tensor_name_map(self.architecture, self.config.num_hidden_layers)
        heads = {"q_proj": self.config.num_attention_heads, "k_proj": self.config.num_key_value_heads}
        for hf_name, values in weights.items():
            part = hf_name.split(".")[-2]
            rows = permute(values, heads[part]) if self.name == "llama" and part in heads else values
            wanted = quantization if isinstance(quantization, str) else quantization(hf_name)
            kind = gguf.GGMLQuantizationType[wanted if rows.ndim == 2 else "F32"]
            packed = quantize(rows, kind.name)
            name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
            self.writer.add_tensor(name, packed, raw_dtype=kind)
        return self

    def save(self) -> Path:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path


def permute(values: np.ndarray, heads: int) -> np.ndarray:
    """Interleave the halves of each head, row by row: new row 2i is old row i, new row 2i + 1 is old row i + half."""
    out = np.empty_like(values)
    size = values.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = values[head * size + i]
            out[head * size + 2 * i + 1] = values[head * size + i + size // 2]
    return out
