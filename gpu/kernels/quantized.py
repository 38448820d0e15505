"""Linear layers with weights as a quantized checkpoint has them: integers of up to 4 or of 8 bits, and FP8 (E4M3).

1. A weight is scale (q - zero). A group of inputs shares scale and zero point: its products are added up without them,
   exactly as integers or E4M3 allow, and the sum is scaled in float32.
2. Integers and, where the device does not multiply E4M3, FP8 weights are converted to the type of the activations, in
   which they are exact. Elsewhere FP8 layers round their activations to E4M3, each row of a group with its own scale.
3. Weights are the left operand: there matrix instructions of Hopper take them from the registers where they are
   unpacked.
4. Many rows are multiplied by cuBLAS, after the matrix was written to memory in the type of the activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from gpu.kernels import prefill
from gpu.kernels.dispatch import on_triton, tl, triton
from gpu.weights.tensors import QuantizedMatrix

LARGEST_E4M3 = 448.0
MULTIPLIES_E4M3 = (8, 9)  # the first compute capability that does
# By bits of a number: up to how many rows, and for these the rows and outputs of a program, its warps and stages. Those
# of integers are the fastest of 200 on an H100, with 28,672 outputs of 4,096 inputs (docs/benchmarks/gpu.md).
TILES = {
    4: ((16, 16, 64, 4, 3), (64, 32, 64, 4, 3), (512, 128, 128, 8, 3)),
    8: ((16, 16, 32, 4, 5), (64, 64, 64, 4, 3), (512, 128, 64, 4, 3)),
    0: ((16, 16, 32, 4, 6), (64, 64, 64, 4, 4), (512, 128, 64, 8, 3)),
}
MOST_ROWS = 512  # for more, writing the matrix to memory costs less than unpacking it for each tile
EXACT_TILE = (16, 16, 4, 2)  # of float32
ONE_ROW = (4, 16, 4)  # of a program that multiplies one row: outputs, tiles read at once, warps


class QuantizedLinear:
    """The product of one or several matrices with the same input, of which some may not be quantized."""

    def __init__(self, parts: Sequence[QuantizedMatrix | torch.Tensor]) -> None:
        self.parts: list[QuantizedMatrix | torch.Tensor] = []
        for part in parts:
            last = self.parts[-1] if self.parts else None
            if isinstance(part, QuantizedMatrix) and isinstance(last, QuantizedMatrix) and last.fits(part):
                self.parts[-1] = replace(
                    last,
                    numbers=torch.cat((last.numbers, part.numbers)),
                    scales=torch.cat((last.scales, part.scales), 1),
                    zeros=None if last.zeros is None or part.zeros is None else torch.cat((last.zeros, part.zeros), 1),
                )
            else:
                self.parts.append(part)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[R, inputs] -> [R, outputs of all parts]"""
        products = [
            quantized_linear(x, part) if isinstance(part, QuantizedMatrix) else F.linear(x, part) for part in self.parts
        ]
        output = products[0] if len(products) == 1 else torch.cat(products, 1)
        return output if bias is None else output.add_(bias)


def quantized_linear(x: torch.Tensor, matrix: QuantizedMatrix) -> torch.Tensor:
    """[R, inputs] -> [R, outputs], in the type of x"""
    if matrix.order is not None:
        x = x.index_select(1, matrix.order)
    x_scales, out_type = None, x.dtype
    if matrix.bits == 0 and prefill.capability_of(x.device) >= MULTIPLIES_E4M3:
        x, x_scales = quantize_rows(x, matrix.group)
    if not on_triton(x):
        return quantized_linear_reference(x, x_scales, matrix).to(out_type)
    (out_size, in_size), num_rows, halves = matrix.shape, len(x), 2 if matrix.bits == 4 else 1
    if num_rows > MOST_ROWS and out_type != torch.float32:
        if x_scales is not None:  # the rounded activations, as numbers of 16 bits
            x = (x.float() * x_scales.repeat_interleave(matrix.group or in_size, 1)[:, :in_size]).to(out_type)
        return F.linear(x, dequantized(matrix, out_type))
    output = torch.empty((num_rows, out_size), dtype=out_type, device=x.device)
    whole = in_size % (halves * matrix.columns) == 0
    if num_rows == 1 and matrix.bits and whole:
        outputs, tiles_at_once, warps = ONE_ROW
        _quantized_row[(triton.cdiv(out_size, outputs),)](
            output,
            x.contiguous(),
            matrix.numbers,
            matrix.scales,
            matrix.scales if matrix.zeros is None else matrix.zeros,
            in_size,
            out_size,
            GROUP=matrix.group,
            BITS=matrix.bits,
            ZERO=matrix.zero,
            HAS_ZEROS=matrix.zeros is not None,
            COLUMNS=matrix.columns,
            OUTPUTS=outputs,
            TILES=tiles_at_once,
            num_warps=warps,
        )
    elif num_rows:
        tiles: tuple[tuple[int, ...], ...] = TILES[matrix.bits]
        if matrix.bits == 4 and prefill.capability_of(x.device)[0] not in prefill.FROM_SHARED_MEMORY:
            tiles = tiles[:2]  # cards that keep operands in registers have too few for the largest tile
        _, rows, outputs, warps, stages = next((tile for tile in tiles if num_rows <= tile[0]), tiles[-1])
        if x.dtype == torch.float32:
            rows, outputs, warps, stages = EXACT_TILE
        _quantized_linear[(triton.cdiv(num_rows, rows), triton.cdiv(out_size, outputs))](
            output,
            x.contiguous(),
            matrix.scales if x_scales is None else x_scales,
            matrix.numbers if x_scales is None else matrix.numbers.view(torch.float8_e4m3fn),
            matrix.scales,
            matrix.scales if matrix.zeros is None else matrix.zeros,
            num_rows,
            in_size,
            out_size,
            GROUP=matrix.group,
            BITS=matrix.bits,
            ZERO=matrix.zero,
            HAS_ZEROS=matrix.zeros is not None,
            HAS_X_SCALES=x_scales is not None,
            HALVES=halves,
            COLUMNS=matrix.columns,
            WHOLE=whole,
            ROWS=rows,
            OUTPUTS=outputs,
            num_warps=warps,
            num_stages=stages,
        )
    return output


def quantized_linear_reference(x: torch.Tensor, x_scales: torch.Tensor | None, matrix: QuantizedMatrix) -> torch.Tensor:
    """Do the work of `quantized_linear` in torch; the result is float32."""
    values = x.float()
    if x_scales is not None:
        values *= x_scales.repeat_interleave(matrix.group or values.shape[1], 1)[:, : values.shape[1]]
    return values @ matrix.dequantize().T


@triton.jit(do_not_specialize=["num_rows"])
def _quantized_linear(
    output_ptr,
    x_ptr,
    x_scales_ptr,  # float32 [rows, groups]
    numbers_ptr,
    scales_ptr,
    zeros_ptr,
    num_rows,
    in_size,
    out_size,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_X_SCALES: tl.constexpr,
    HALVES: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    in_rows, in_outputs = row < num_rows, output < out_size
    column = tl.arange(0, COLUMNS)
    x_ptrs = x_ptr + row.to(tl.int64)[None, :] * in_size + column[:, None]
    numbers_ptrs = numbers_ptr + output.to(tl.int64)[:, None] * (in_size // HALVES) + column[None, :]
    num_groups = tl.cdiv(in_size, GROUP) if GROUP > 0 else 1
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for first in range(0, in_size, COLUMNS * HALVES):
        stored = in_outputs[:, None]
        if not WHOLE:
            stored &= (first + column < in_size)[None, :]
        numbers = tl.load(numbers_ptrs + first // HALVES, mask=stored, other=0.0 if HAS_X_SCALES else 0)
        for half in tl.static_range(HALVES):
            start = first + half * COLUMNS
            given = in_rows[None, :] & (start + column < in_size)[:, None]
            x = tl.load(x_ptrs + start, mask=given, other=0.0)
            group = start // GROUP if GROUP > 0 else 0
            if HAS_X_SCALES:
                weight = numbers
            else:
                zero = ZERO
                if HAS_ZEROS:
                    zero = tl.load(zeros_ptr + group * out_size + output, mask=in_outputs, other=0)[:, None]
                weight = _number(numbers, zero, half, BITS, x.dtype)
            if HAS_X_SCALES:  # Hopper adds up few bits of such products unless it is limited
                product = tl.dot(weight, x, max_num_imprecise_acc=COLUMNS)
            else:
                product = tl.dot(weight, x, input_precision="ieee")
            if GROUP > 0:
                scale = tl.load(scales_ptr + group * out_size + output, mask=in_outputs, other=0.0)
                product *= scale[:, None]
                if HAS_X_SCALES:
                    product *= tl.load(x_scales_ptr + row * num_groups + group, mask=in_rows, other=0.0)[None, :]
            total += product
    if GROUP == 0:
        total *= tl.load(scales_ptr + output, mask=in_outputs, other=0.0)[:, None]
        if HAS_X_SCALES:
            total *= tl.load(x_scales_ptr + row, mask=in_rows, other=0.0)[None, :]
    target = output_ptr + row.to(tl.int64)[None, :] * out_size + output[:, None]
    tl.store(target, total.to(output_ptr.dtype.element_ty), mask=in_outputs[:, None] & in_rows[None, :])


# sum((q - zero) x) over a tile equals sum((16 + q) x) - (16 + zero) sum(x). The float32 number 16 + q has the 4 bits of
# q at the top of its fraction, so no q has to be converted or reduced by `zero`. With 8 bits the number is 256 + q.
@triton.jit(do_not_specialize=["out_size"])
def _quantized_row(
    output_ptr,
    x_ptr,
    numbers_ptr,
    scales_ptr,
    zeros_ptr,
    in_size,
    out_size,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TILES: tl.constexpr,
):
    HALVES: tl.constexpr = 2 if BITS == 4 else 1
    ADDED: tl.constexpr = 16.0 if BITS == 4 else 256.0
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    column, num_tiles = tl.arange(0, COLUMNS), in_size // (HALVES * COLUMNS)
    total = tl.zeros([OUTPUTS, TILES], tl.float32)
    for first in range(0, num_tiles, TILES):
        tile = first + tl.arange(0, TILES)
        given, used = tile < num_tiles, (output < out_size)[:, None] & (tile < num_tiles)[None, :]
        source = (output[:, None] * num_tiles + tile[None, :]) * COLUMNS
        numbers = tl.load(numbers_ptr + source[:, :, None] + column[None, None, :], mask=used[:, :, None], other=0)
        for half in tl.static_range(HALVES):
            start = (tile * HALVES + half) * COLUMNS
            x = tl.load(x_ptr + start[:, None] + column[None, :], mask=given[:, None], other=0.0).to(tl.float32)
            bits = ((numbers >> 4 * half) & 15).to(tl.int32) << 19 if BITS == 4 else numbers.to(tl.int32) << 15
            weight = (bits | (0x41800000 if BITS == 4 else 0x43800000)).to(tl.float32, bitcast=True)
            place = output[:, None] + (start // GROUP * out_size if GROUP > 0 else start * 0)[None, :]
            zero = ZERO
            if HAS_ZEROS:
                zero = tl.load(zeros_ptr + place, mask=used, other=0).to(tl.float32)
            product = tl.sum(weight * x[None, :, :], 2) - (ADDED + zero) * tl.sum(x, 1)[None, :]
            total += product * tl.load(scales_ptr + place, mask=used, other=0.0)
    tl.store(output_ptr + output, tl.sum(total, 1).to(output_ptr.dtype.element_ty), mask=output < out_size)


@triton.jit
def _number(numbers, zero, half: tl.constexpr, BITS: tl.constexpr, kind: tl.constexpr):
    """Return q - zero, or the value of an E4M3 number, exactly, in the type `kind`.

    The bits of q in the lowest bits of 128, 1024 or 2 ** 23 give that number plus q: no slow conversion of integers.
    """
    if BITS == 0:
        # E4M3 as a float16 with a smaller exponent. The two that are not numbers are in no checkpoint.
        wide = numbers.to(tl.uint16)
        number = (((wide & 128) << 8) | ((wide & 127) << 7)).to(tl.float16, bitcast=True) * 256.0
    else:
        integers = numbers
        if BITS == 4:
            integers = (numbers >> (4 * half)) & 15
        zeros = tl.zeros([1, 1], tl.uint8) + zero
        if kind == tl.float16:
            number = _in_16_bits(integers, 0x6400, tl.float16) - _in_16_bits(zeros, 0x6400, tl.float16)
        elif kind == tl.bfloat16 and BITS == 4:
            number = _in_16_bits(integers, 0x4300, tl.bfloat16) - _in_16_bits(zeros, 0x4300, tl.bfloat16)
        else:
            number = _in_32_bits(integers) - _in_32_bits(zeros)
    return number.to(kind)


@triton.jit
def _in_16_bits(integers, large: tl.constexpr, kind: tl.constexpr):
    return (integers.to(tl.int16) | large).to(kind, bitcast=True)


@triton.jit
def _in_32_bits(integers):
    return (integers.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)


def dequantized(matrix: QuantizedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """Return [outputs, inputs] in a type of 16 bits, inputs in the order of the columns."""
    (out_size, in_size), columns = matrix.shape, matrix.columns * (2 if matrix.bits == 4 else 1)
    output = torch.empty((out_size, in_size), dtype=dtype, device=matrix.numbers.device)
    _dequantize[(triton.cdiv(in_size, columns), triton.cdiv(out_size, 16))](
        output,
        matrix.numbers,
        matrix.scales,
        matrix.scales if matrix.zeros is None else matrix.zeros,
        in_size,
        out_size,
        GROUP=matrix.group,
        BITS=matrix.bits,
        ZERO=matrix.zero,
        HAS_ZEROS=matrix.zeros is not None,
        COLUMNS=matrix.columns,
        OUTPUTS=16,
    )
    return output


@triton.jit
def _dequantize(
    output_ptr,
    numbers_ptr,
    scales_ptr,
    zeros_ptr,
    in_size,
    out_size,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    HALVES: tl.constexpr = 2 if BITS == 4 else 1
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    first = tl.program_id(0) * COLUMNS * HALVES
    in_outputs, column = output < out_size, tl.arange(0, COLUMNS)
    row = output.to(tl.int64)[:, None]
    stored = in_outputs[:, None] & (first + column < in_size)[None, :]
    numbers = tl.load(numbers_ptr + row * (in_size // HALVES) + first // HALVES + column[None, :], mask=stored, other=0)
    for half in tl.static_range(HALVES):
        start = first + half * COLUMNS
        group = start // GROUP if GROUP > 0 else 0
        zero = ZERO
        if HAS_ZEROS:
            zero = tl.load(zeros_ptr + group * out_size + output, mask=in_outputs, other=0)[:, None]
        scale = tl.load(scales_ptr + group * out_size + output, mask=in_outputs, other=0.0)[:, None]
        values = _number(numbers, zero, half, BITS, tl.float32) * scale
        target = output_ptr + row * in_size + start + column[None, :]
        tl.store(target, values.to(output_ptr.dtype.element_ty), mask=stored)


def quantize_rows(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round activations to E4M3: [R, inputs] -> the same as float8_e4m3fn, and float32 [R, groups] with the scale of
    each `group` of a row's inputs (0: of all), by which its largest number becomes the largest of E4M3."""
    num_rows, in_size = x.shape
    size = group or in_size
    num_groups = -(-in_size // size)
    if not on_triton(x):
        parts = F.pad(x.float(), (0, num_groups * size - in_size)).unflatten(1, (num_groups, size))
        scales = parts.abs().amax(2).clamp(min=1e-10) / LARGEST_E4M3
        rounded = (parts / scales[..., None]).flatten(1)[:, :in_size].to(torch.float8_e4m3fn)
        return rounded.contiguous(), scales
    output = torch.empty((num_rows, in_size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_rows, num_groups), dtype=torch.float32, device=x.device)
    if num_rows:
        block = triton.next_power_of_2(size)
        options: dict[str, Any] = {"GROUP": size, "BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}
        _quantize_rows[(num_rows, num_groups)](output, scales, x, x.stride(0), in_size, LARGEST_E4M3, **options)
    return output, scales


@triton.jit
def _quantize_rows(
    output_ptr, scales_ptr, x_ptr, row_stride, in_size, largest, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    place = tl.arange(0, BLOCK)
    column = group * GROUP + place
    inside = (place < GROUP) & (column < in_size)
    x = tl.load(x_ptr + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    # The sum is 0, or no number if one of x is not finite: then the row's outputs are not, either.
    scale = tl.maximum(tl.max(tl.abs(x)), 1e-10) / largest + tl.sum(x * 0.0)
    tl.store(output_ptr + row * in_size + column, (x / scale).to(output_ptr.dtype.element_ty), mask=inside)
    tl.store(scales_ptr + row * tl.num_programs(1) + group, scale)
