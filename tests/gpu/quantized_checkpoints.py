"""Writes the linear layers of a model as quantized checkpoints have them, with the numbers that they then stand for.

Scales are plain ones, from the least to the largest weight: all that is wanted of a file is that it is of its kind.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]
OF_4_BITS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


class Written(NamedTuple):
    """The tensors of a layer by their last names, and the weights that they mean: float32 [outputs, inputs]."""

    tensors: Tensors
    meant: torch.Tensor


class Format(NamedTuple):
    """`quantization_config`, and a function that writes a layer."""

    config: dict[str, Any]
    write: Callable[[torch.Tensor], Written]


def grouped(weight: torch.Tensor, bits: int, group: int, *, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Return q [outputs, inputs] from 0 on, zeros and scales in float16 [outputs, groups], and scale (q - zero)."""
    parts = weight.unflatten(1, (-1, group))
    most = 2**bits - 1
    if symmetric:
        scales = (parts.abs().amax(-1) / (most // 2)).half()
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        least = parts.amin(-1).clamp(max=0)
        scales = ((parts.amax(-1).clamp(min=0) - least) / most).half()
        zeros = (-least / scales.float()).round().clamp(0, most)
    steps, zeros = scales.float()[..., None], zeros.float()[..., None]
    q = (parts / steps + zeros).round().clamp(0, most)
    return q.flatten(1).int(), zeros.squeeze(-1).int(), scales, ((q - zeros) * steps).flatten(1)


def packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, numbers] -> int32 [rows, words], the lowest bits first."""
    each = (numbers.numpy()[..., None] >> np.arange(bits) & 1).astype(np.uint8).reshape(len(numbers), -1)
    each = np.pad(each, [(0, 0), (0, -each.shape[1] % 32)])
    return torch.from_numpy(np.packbits(each, axis=1, bitorder="little").view(np.int32))


def gptq(bits: int, group: int = 64, *, act_order: bool = False, symmetric: bool = False, v2: bool = False) -> Format:
    config: dict[str, Any] = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order}
    config |= {"sym": symmetric, "damp_percent": 0.01} | ({"checkpoint_format": "gptq_v2"} if v2 else {})

    def write(weight: torch.Tensor) -> Written:
        cols = weight.shape[1]
        size = cols if group == -1 else group
        order = torch.randperm(cols, generator=torch.Generator().manual_seed(cols)) if act_order else torch.arange(cols)
        q, zeros, scales, meant = grouped(weight[:, order], bits, size, symmetric=symmetric)
        back = order.argsort()
        stored = zeros if v2 else zeros - 1 & 2**bits - 1
        tensors = {
            "qweight": packed(q[:, back], bits).T.contiguous(),
            "qzeros": packed(stored.T.contiguous(), bits),
            "scales": scales.T.contiguous(),
            "g_idx": (back // size).int(),
        }
        return Written(tensors, meant[:, back])

    return Format(config, write)


def awq(group: int = 64) -> Format:
    def in_words(numbers: torch.Tensor) -> torch.Tensor:
        eights = numbers.unflatten(1, (-1, 8)).long()
        words = sum((eights[..., output] << 4 * place) for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
        assert isinstance(words, torch.Tensor)
        return words.to(torch.int32)

    def write(weight: torch.Tensor) -> Written:
        q, zeros, scales, meant = grouped(weight, 4, group, symmetric=False)
        tensors = {"qweight": in_words(q.T), "qzeros": in_words(zeros.T), "scales": scales.T.contiguous()}
        return Written(tensors, meant)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Format(config | {"modules_to_not_convert": ["lm_head"]}, write)


def _to_fp8(weight: torch.Tensor) -> torch.Tensor:
    return weight.clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8(kind: str) -> Format:
    """Kinds: "tensor" with static activations, "block" of 128 x 128."""
    config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "modules_to_not_convert": ["lm_head"]}
    config |= {"activation_scheme": "static"} if kind == "tensor" else {"weight_block_size": [128, 128]}

    def write(weight: torch.Tensor) -> Written:
        if kind == "tensor":
            scale = weight.abs().max() / 448
            q = _to_fp8(weight / scale)
            scales = {"weight_scale": scale, "input_scale": torch.tensor(0.01)}
            return Written({"weight": q, **scales}, q.float() * scale)
        rows, cols = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -cols % 128, 0, -rows % 128))
        blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        scale = blocks.abs().amax((1, 3)) / 448
        each = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :cols]
        q = _to_fp8(weight / each)
        return Written({"weight": q, "weight_scale_inv": scale}, q.float() * each)

    return Format(config, write)


def compressed(kind: str, group: int | None = None, *, symmetric: bool = True, act_order: bool = False) -> Format:
    """Kinds: "int8", "fp8", "fp8-block", "w4a16", "w8a16", "nvfp4"."""
    bits = 4 if kind in ("w4a16", "nvfp4") else 8
    form = {"int8": "int-quantized", "nvfp4": "nvfp4-pack-quantized", "w4a16": "pack-quantized"}
    weights: dict[str, Any] = {
        "num_bits": bits,
        "type": "float" if kind[:3] in ("fp8", "nvf") else "int",
        "symmetric": symmetric,
        "strategy": "block" if kind == "fp8-block" else "group" if group else "channel",
        "group_size": group,
        "block_structure": [128, 128] if kind == "fp8-block" else None,
        "actorder": "group" if act_order else None,
        "dynamic": False,
    }
    dynamic = {"num_bits": 8, "type": weights["type"], "strategy": "token", "dynamic": True, "symmetric": True}
    config = {
        "quant_method": "compressed-tensors",
        "format": form.get(kind, "pack-quantized" if kind == "w8a16" else "float-quantized"),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": dynamic if kind in ("int8", "fp8") else None,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head", "re:.*layers[.]1[.]mlp.*"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }

    def write(weight: torch.Tensor) -> Written:
        rows, cols = weight.shape
        if kind == "fp8-block":
            found = fp8("block").write(weight)
            return Written(
                {"weight": found.tensors["weight"], "weight_scale": found.tensors["weight_scale_inv"]}, found.meant
            )
        if kind == "fp8":
            scale = weight.abs().amax(1, keepdim=True).bfloat16() / 448
            q = _to_fp8(weight / scale.float())
            return Written({"weight": q, "weight_scale": scale}, q.float() * scale.float())
        if kind == "nvfp4":
            return _nvfp4(weight)
        if kind == "int8":
            if symmetric:
                scale = weight.abs().amax(1, keepdim=True) / 127
                q = (weight / scale).round().to(torch.int8)
                return Written({"weight": q, "weight_scale": scale}, q.float() * scale)
            q, zeros, scales, meant = grouped(weight, 8, cols, symmetric=False)
            tensors = {"weight": (q - 128).to(torch.int8), "weight_zero_point": (zeros - 128).to(torch.int8)}
            return Written(tensors | {"weight_scale": scales}, meant)
        order = torch.randperm(cols, generator=torch.Generator().manual_seed(7)) if act_order else torch.arange(cols)
        q, zeros, scales, meant = grouped(weight[:, order], bits, group or cols, symmetric=symmetric)
        back = order.argsort()
        tensors = {"weight_packed": packed(q[:, back], bits), "weight_scale": scales}
        tensors["weight_shape"] = torch.tensor([rows, cols])
        if not symmetric:
            tensors["weight_zero_point"] = packed(zeros.T.contiguous(), bits).T.contiguous()
        if act_order:
            assert group is not None
            tensors["weight_g_idx"] = (back // group).int()
        return Written(tensors, meant[:, back])

    return Format(config, write)


def _nvfp4(weight: torch.Tensor) -> Written:
    """Blocks of 16 numbers of 4 bits, with a scale in FP8, and one for all."""
    parts = weight.unflatten(1, (-1, 16))
    overall = 448 * 6 / weight.abs().max()
    scales = _to_fp8(parts.abs().amax(-1) / 6 * overall)
    steps = (scales.float() / overall)[..., None]
    q = ((parts / steps.clamp(min=1e-20))[..., None] - OF_4_BITS).abs().argmin(-1).to(torch.uint8)
    both = q.flatten(1).unflatten(1, (-1, 2))
    tensors = {"weight_packed": both[..., 0] | both[..., 1] << 4, "weight_scale": scales}
    tensors["weight_global_scale"] = overall.reshape(1)
    return Written(tensors, (OF_4_BITS[q.long()] * steps).flatten(1))


def modelopt(algorithm: str) -> Format:
    """Kinds: "FP8", "NVFP4"."""

    def write(weight: torch.Tensor) -> Written:
        if algorithm == "FP8":
            found = fp8("tensor").write(weight)
            return Written(found.tensors | {"k_scale": torch.tensor(1.0)}, found.meant)
        tensors, _ = _nvfp4(weight)
        overall = 1 / tensors["weight_global_scale"]
        numbers, scales = tensors["weight_packed"], tensors["weight_scale"]
        q = torch.stack((numbers & 15, numbers >> 4), -1).flatten(1)
        steps = (scales.float() * overall).repeat_interleave(16, 1)
        return Written(
            {"weight": numbers, "weight_scale": scales, "weight_scale_2": overall[0]}, OF_4_BITS[q.long()] * steps
        )

    config = {"quant_method": "modelopt", "quant_algo": algorithm, "kv_cache_quant_algo": "FP8"}
    return Format(config | {"exclude_modules": ["lm_head", "model.layers.1.mlp*"]}, write)


# The code book of Dettmers et al., "QLoRA" (arXiv:2305.14314), appendix E, and that of bitsandbytes' fp4: numbers of
# 2 bits of exponent and 1 of mantissa, over the largest of them.
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334]
NF4 += [-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
NF4 += [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
FP4 = [sign * size / 12 for sign in (1, -1) for size in (0, 0.0625, 8, 12, 4, 6, 2, 3)]


def bitsandbytes(kind: str, *, nested: bool, block: int = 64) -> Format:
    """Blocks of the flattened matrix, which may run over the ends of rows. `nested`: scales in 8 bits."""
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind}
    config |= {"bnb_4bit_use_double_quant": nested, "bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": None}
    book = torch.tensor(NF4 if kind == "nf4" else FP4)

    def write(weight: torch.Tensor) -> Written:
        scales = torch.stack([part.abs().max() for part in weight.flatten().split(block)])
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16"}
        state |= {"shape": list(weight.shape)}
        tensors = {"weight.absmax": scales, "weight.quant_map": book.clone()}
        if nested:
            table = torch.linspace(-1, 1, 256) ** 3
            offset = scales.mean()
            outer = torch.stack([part.abs().max() for part in (scales - offset).split(100)])
            each = outer.repeat_interleave(100)[: len(scales)]
            places = (((scales - offset) / each)[:, None] - table).abs().argmin(1)
            state |= {"nested_blocksize": 100, "nested_dtype": "float32", "nested_offset": offset.item()}
            tensors |= {"weight.absmax": places.to(torch.uint8), "weight.nested_absmax": outer}
            tensors |= {"weight.nested_quant_map": table}
            scales = table[places] * each + offset
        each = scales.repeat_interleave(block)[: weight.numel()]
        q = ((weight.flatten() / each)[:, None] - book).abs().argmin(1)
        pairs = torch.nn.functional.pad(q, (0, q.numel() % 2)).to(torch.uint8).unflatten(0, (-1, 2))
        tensors["weight"] = (pairs[:, 0] << 4 | pairs[:, 1])[:, None]
        text = json.dumps(state).encode()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return Written(tensors, (book[q] * each).view(weight.shape))

    return Format(config, write)


FORMATS: dict[str, Format] = {
    "FP8, per tensor, static": fp8("tensor"),
    "FP8, 128 x 128": fp8("block"),
    "compressed-tensors FP8, per channel": compressed("fp8"),
    "compressed-tensors FP8, 128 x 128": compressed("fp8-block"),
    "compressed-tensors W8A8": compressed("int8"),
    "compressed-tensors W8A8, zero points": compressed("int8", symmetric=False),
    "compressed-tensors W4A16, groups of 64": compressed("w4a16", 64),
    "compressed-tensors W4A16, zero points": compressed("w4a16", 32, symmetric=False),
    "compressed-tensors W4A16, act-order": compressed("w4a16", 64, act_order=True),
    "compressed-tensors W8A16": compressed("w8a16"),
    "compressed-tensors NVFP4": compressed("nvfp4", 16),
    "modelopt FP8": modelopt("FP8"),
    "modelopt NVFP4": modelopt("NVFP4"),
    "AWQ": awq(),
    "GPTQ 4 bits": gptq(4),
    "GPTQ 4 bits, symmetric": gptq(4, symmetric=True),
    "GPTQ 4 bits, act-order": gptq(4, act_order=True),
    "GPTQ 4 bits, one group, act-order": gptq(4, -1, act_order=True),
    "GPTQ 4 bits, v2": gptq(4, v2=True),
    "GPTQ 3 bits": gptq(3),
    "GPTQ 2 bits": gptq(2, 32),
    "GPTQ 8 bits": gptq(8),
    "bitsandbytes nf4": bitsandbytes("nf4", nested=False),
    "bitsandbytes nf4, nested": bitsandbytes("nf4", nested=True),
    "bitsandbytes fp4, nested, blocks of 100": bitsandbytes("fp4", nested=True, block=100),
}
# Numbers that no form of the C++ library holds: it rounds them to bfloat16.
ROUNDED = ("act-order", "GPTQ 8 bits", "W8A8, zero points", "bitsandbytes")
