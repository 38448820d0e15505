"""Write the tables of docs/models.md from the records of families, types, formats and syntaxes. Run this program after
the records change; a test compares them with the page.

Some columns are written by hand: models' names, and measured figures. Those cells stay as they are in the page; a new
row gets a first text, if the record has one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.errors import ConfigError
from gpu.checkpoint import ModelError
from gpu.checkpoint.architecture import Architecture
from gpu.checkpoint.config import HeaderField
from gpu.checkpoint.families.table import FAMILIES, spec_of
from gpu.checkpoint.gguf_tokenizer import _PRE_TOKENIZERS
from gpu.checkpoint.hf_config import config_from_hf
from gpu.checkpoint.quantized_layers import QuantizedLayer, linear_layers, quantized_checkpoint
from gpu.checkpoint.quantized_rows import TENSOR_TYPES, QuantizedRows
from gpu.cpu.decoder import CPUCausalLM
from gpu.cpu.library import load_library
from gpu.cpu.weights import _AS_THEY_ARE, FORMS, WeightBuffer, pack
from gpu.sharding import Layout, check_cuts
from protocol.syntax.registry import SYNTAXES
from tests.gpu.quantized_checkpoints import FORMATS, compressed

PAGE = Path(__file__).with_name("models.md")
Cells = tuple[str, ...]


class ByHand(str):
    """A cell that the page decides; this is its first text."""


# ------------------------------------------------------------------------------------------------------------- families


SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096, "qk_rope_head_dim": 16}
MODEL_SIZES: dict[str, dict[str, Any]] = {  # by family, where SIZES and the smallest allowed numbers make no model
    "GraniteMoeHybridForCausalLM": {"layer_types": ["full_attention"] * 4, "num_local_experts": 0},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "DeepseekV3ForCausalLM": {"num_experts": 16},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 0},
}


def families() -> Iterable[Cells]:
    yield "`architectures` in config.json", "models", "GGUF", "computed by", "several ranks"
    names: dict[str, list[str]] = {}
    for name, family in FAMILIES.items():
        names.setdefault(family.name, []).append(name)
    for family_name, of_family in names.items():
        family = FAMILIES[family_name]
        gguf = family.gguf or "-"
        yield ", ".join(of_family), ByHand(family.model_type), gguf, *_computed(family)


def _computed(family: Architecture) -> tuple[str, str]:
    """Return what computes a small model of this family, and how it is divided among ranks."""
    values = {key: allowed[0] for key, allowed in family.allowed_values.items() if allowed[0] is not None}
    values |= {key: _smallest(each) for key, each in family.numbers.items() if each.default is None}
    values |= SIZES | {"architectures": [family.name], "model_type": family.model_type}
    config = config_from_hf(values | MODEL_SIZES.get(family.name, {}), source=family.name)
    spec = spec_of(config)
    computes = ["C++" if CPUCausalLM.supports(config) else "torch (CPU)"]
    computes.append("CUDA" if spec.has_kernels else "torch (CUDA)")
    cuts = [("tensor", Layout(tensor_parallel_size=2)), ("pipeline", Layout(pipeline_parallel_size=2))]
    ranks = [name for name, layout in cuts if _works(check_cuts, spec, layout, gathers=True)]
    return ", ".join(computes), ", ".join(ranks) or "no"


def _smallest(field: HeaderField) -> float:
    return 64 if field.unit == "elements" else max(field.low, min(2, field.high))


def _works(check: Callable[..., object], *arguments: Any, **options: Any) -> bool:
    try:
        check(*arguments, **options)
    except (ConfigError, ModelError):
        return False
    return True


# ------------------------------------------------------------------------------------------------ types and checkpoints


def tensor_types() -> Iterable[Cells]:
    yield "type", "bits per weight", "on the CPU", "form", "bits there", "perplexity"
    for kind in TENSOR_TYPES:
        weight: Any = np.ones((16, 256), np.float32 if kind.name == "F32" else np.float16)
        if kind.block > 1:  # the byte gives every type scales that are not too large
            data = np.full((16, 256 // kind.block * kind.block_bytes), 0x68, np.uint8)
            weight = QuantizedRows(kind.name, (16, 256), data)
        yield kind.name, f"{8 * kind.block_bytes / kind.block:.4g}", *_stored(weight, kind.name), ByHand("-")


def formats() -> Iterable[Cells]:
    yield "format", "on the CPU", "form", "bits there", "on CUDA", "perplexity"
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    for name, form in FORMATS.items():
        tensors = {f"mlp.up_proj.{kind}": _numbers(tensor) for kind, tensor in form.write(weight).tensors.items()}
        [(_, layer)] = linear_layers(tensors.items(), quantized_checkpoint(form.config, name), tensors, name)
        yield name, *_stored(layer.read(), ""), _on_cuda(layer), ByHand("-")


def _on_cuda(layer: QuantizedLayer) -> str:
    rows = layer.packed()
    if rows is None or rows.fields() is None:
        return "`dtype`"
    return f"{rows.bits} bits" if rows.bits else "FP8"


def _numbers(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the tensor as the reader of safetensors files returns it."""
    kinds = {torch.float8_e4m3fn: torch.uint8, torch.bfloat16: torch.uint16}
    return tensor.contiguous().view(kinds.get(tensor.dtype, tensor.dtype)).numpy()


def _stored(weight: Any, kind: str) -> Cells:
    """Return what the C++ library does with a weight from a file with this type, the form, and its bits per weight."""
    library = load_library()
    assert library is not None, "the C++ library is missing: python setup.py build_ext --inplace"
    matrix = pack(library, WeightBuffer(), [weight])
    [form] = matrix.forms
    if kind in ("BF16", *_AS_THEY_ARE):
        way = "kept packed"
    elif not isinstance(weight, QuantizedRows):
        way = "rounded"
    else:
        exact = weight.type in _AS_THEY_ARE or weight.in_served_type() or weight.as_q8_0()
        way = "repacked exactly" if exact else "rounded"
    return way, FORMS[form], f"{8 * matrix.data.nbytes / math.prod(weight.shape):.3g}"


# What checkpoints of each method may have besides FORMATS, by the words for it.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "fp8": {"E5M2": {"fmt": "e5m2"}, "scales of the KV cache": {"kv_cache_scheme": {"num_bits": 8}}},
    "compressed-tensors": {
        "ignore lists with patterns": compressed("int8").config | {"ignore": ["re:.*mlp.*"]},
        "MXFP4": compressed("nvfp4", 16).config | {"format": "mxfp4-pack-quantized"},
        "sparse formats": compressed("int8").config | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "transforms": compressed("int8").config | {"transform_config": {"config_groups": {"u": {}}}},
        "KV cache schemes": compressed("int8").config | {"kv_cache_scheme": {"num_bits": 8}},
    },
    "gptq": {"settings per layer (`dynamic`)": {"dynamic": {"-:.*": {}}}},
    "awq": {"version gemv": {"version": "gemv"}, "8 bits": {"bits": 8}},
    "bitsandbytes": {
        "8 bits": {"load_in_8bit": True},
        "packed in other types than bytes": {"bnb_4bit_quant_storage": "bfloat16"},
    },
    "modelopt": {"other algorithms": {"quant_algo": "W4A8_AWQ"}},
    "fbgemm_fp8": {"": {}},
    "torchao": {"": {}},
    "hqq": {"": {}},
    "aqlm": {"": {}},
}


def methods() -> Iterable[Cells]:
    yield "`quant_method`", "served", "refused"
    for method, variants in VARIANTS.items():
        found: dict[bool, list[str]] = {True: [], False: []}
        for words, config in variants.items():
            found[_works(quantized_checkpoint, config | {"quant_method": method}, method)].append(words or "all")
        formats = [name for name, form in FORMATS.items() if form.config["quant_method"] == method]
        served = found[True] + ["the formats below"] * bool(formats)
        yield f"`{method}`", ", ".join(served), ", ".join(found[False])
    families = [name for name, family in FAMILIES.items() if "mxfp4" in family.quantizations]
    yield "`mxfp4`", ", ".join(families), "other families"


# --------------------------------------------------------------------------------------------- tokenizers and syntaxes


def pre_tokenizers() -> Iterable[Cells]:
    yield "`tokenizer.ggml.pre`", "vocabulary that was compared"
    alike: dict[Any, list[str]] = {}
    for name, pre in _PRE_TOKENIZERS.items():
        alike.setdefault(pre, []).append(f"`{name}`")
    for names in alike.values():
        yield ", ".join(names), ByHand("none")


def syntaxes() -> Iterable[Cells]:
    yield "`tool_parser`", "models", "calls begin with", "reasoning"
    for syntax in SYNTAXES.values():
        begins = f"`{syntax.opening}`" if syntax.opening else "a channel"
        begins += f", or `{syntax.bare}` where the text begins" if syntax.bare else ""
        reasoning = f"`{syntax.reasoning.opening.strip()}`" if syntax.reasoning else ByHand("as the template says")
        yield f"`{syntax.name}`", ByHand(), begins, reasoning


# ----------------------------------------------------------------------------------------------------------- the page


TABLES = (families, tensor_types, methods, formats, pre_tokenizers, syntaxes)


def written(page: str) -> str:
    """Return the page with the tables as they are now."""
    for table in TABLES:
        begin = f"<!-- {table.__name__}: written by models_tables.py -->\n"
        assert begin in page, f"models.md has no place for a table: {begin}"
        start = page.index(begin) + len(begin)
        end = page.index("<!-- end -->", start)
        page = page[:start] + _table(table(), page[start:end]) + page[end:]
    return page


def _table(rows: Iterable[Cells], before: str) -> str:
    """Return the rows as Markdown. `before` is the table so far, with the cells that are written by hand."""
    lines = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in before.splitlines()]
    by_hand = {cells[0]: dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]}
    header, *body = rows
    texts = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    for cells in body:
        key, *others = (cell.replace("|", "\\|") for cell in cells)
        kept = [
            by_hand.get(key, {}).get(column) or cell if isinstance(given, ByHand) else cell
            for column, cell, given in zip(header[1:], others, cells[1:], strict=True)
        ]
        texts.append("| " + " | ".join([key, *kept]) + " |")
    return "\n".join(texts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
