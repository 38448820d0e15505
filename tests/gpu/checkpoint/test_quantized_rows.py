"""Every GGUF type, in the type that it is computed with: the same float32 numbers as the `gguf` library reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from gpu.checkpoint.quantized_rows import TENSOR_TYPES, QuantizedRows, scaled_rows
from gpu.cpu.library import usable
from gpu.cpu.weights import K6, S8, S16, U4, U8, WeightBuffer, pack
from tests.gpu.cpu.test_matrices import product, seen, stored
from tests.gpu.native_builds import needs_library

LIBRARIES = list(usable())
# Where the float16 scales of a block are, for types whose numbers are not served as they are.
SCALES: dict[str, int | None] = {"Q3_K": 108, "IQ4_NL": 0, "IQ4_XS": 0, "IQ3_XXS": 0, "IQ3_S": 0, "IQ2_XXS": 0}
SCALES |= {"IQ2_XS": 0, "IQ2_S": 0, "IQ1_S": 0, "IQ1_M": None, "TQ1_0": 52, "TQ2_0": 64}
FORMS = {"Q3_K": K6, "IQ3_S": K6, "IQ4_NL": U8, "TQ1_0": U4, "TQ2_0": U4}  # of the others: S8
SIZES = {each.name: each for each in TENSOR_TYPES}


def rows_of(kind: str, rows: int, cols: int) -> QuantizedRows:
    """Random bytes, with scales of every size that float16 has."""
    generator = np.random.default_rng(rows)
    size = SIZES[kind]
    blocks = generator.integers(0, 256, (rows, cols // size.block, size.block_bytes), dtype=np.uint8)
    d = (generator.normal(0, 1, blocks.shape[:2]) * 10.0 ** generator.integers(-7, 2, blocks.shape[:2])).astype("f2")
    d[0] = 0
    if kind == "IQ1_M":  # the upper four bits of four words
        bits = d.view(np.uint16)
        for part, byte in enumerate((49, 51, 53, 55)):
            blocks[..., byte] = blocks[..., byte] & 15 | (bits >> 4 * part & 15).astype(np.uint8) << 4
    else:
        at = SCALES[kind]
        assert at is not None
        blocks[..., at : at + 2] = d[..., None].view(np.uint8)
    return QuantizedRows(kind, (rows, cols), blocks.reshape(rows, -1))


@pytest.mark.parametrize("kind", SCALES)
def test_another_type_holds_the_very_numbers(kind: str):
    rows = rows_of(kind, 67, 768)
    found = rows.in_served_type()
    assert found is not None
    assert found.shape == rows.shape
    expected = dequantize(rows.data, GGMLQuantizationType[kind])
    assert np.count_nonzero(expected) > expected.size // 3
    assert np.array_equal(found.dequantize(), expected)


def test_only_q2_k_has_no_other_type():
    others = {each.name for each in TENSOR_TYPES} - {*SCALES}
    assert all(QuantizedRows(kind, (0, 256), np.zeros((0, 0), np.uint8)).in_served_type() is None for kind in others)
    assert others == {
        *("F32", "F16", "BF16", "MXFP4", "Q2_K"),
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"),
    }


@needs_library
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
@pytest.mark.parametrize("kind", SCALES)
def test_the_library_computes_with_the_very_numbers(library, kind: str):
    rows = rows_of(kind, 37, 512)
    matrix = pack(library, WeightBuffer(), [rows])
    assert matrix.forms == {FORMS.get(kind, S8)}
    expected = torch.from_numpy(rows.dequantize())
    assert torch.equal(stored(library, matrix), expected)
    x = torch.randn(9, 512, generator=torch.Generator().manual_seed(0))
    exact = seen(library, x) @ expected.double().T
    found = product(library, matrix, x)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("bits", "halves", "per_scale", "kind"),
    [
        (4, True, 32, "Q4_0"),
        (5, True, 128, "Q5_0"),
        (8, True, 96, "Q8_0"),
        (8, True, 16, "S8"),
        (4, False, 32, "S8"),
        (8, False, 288, "S8"),
        (16, False, 128, "S16"),
    ],
)
def test_numbers_with_scales_are_held_exactly(bits: int, halves: bool, per_scale: int, kind: str):
    generator = np.random.default_rng(bits)
    scales = generator.uniform(1e-3, 1e-2, (7, -(-288 // per_scale))).astype("f2" if halves else "f4").astype("f4")
    if bits == 16:
        values = generator.standard_normal((7, 288)).astype(np.float32)
        numbers = (values.view(np.uint32) >> 16).astype(np.uint16)
        values = (numbers.astype(np.uint32) << 16).view(np.float32)
    else:
        numbers = generator.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (7, 288)).astype(np.int8)
        values = numbers.astype(np.float32)
    expected = values * np.repeat(scales, per_scale, axis=1)[:, :288]
    found = scaled_rows(numbers, scales, per_scale)
    assert isinstance(found, QuantizedRows)
    assert found.type == kind
    assert np.array_equal(found.dequantize(), expected)
    for library in LIBRARIES[:1]:
        matrix = pack(library, WeightBuffer(), [found])
        assert torch.equal(stored(library, matrix), torch.from_numpy(expected))
        assert kind != "S16" or matrix.forms == {S16}


def test_scales_of_fewer_numbers_than_a_block_are_multiplied():
    numbers = np.arange(-48, 48, dtype=np.int8).reshape(2, 48)
    scales = np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], np.float32)
    found = scaled_rows(numbers, scales, 16)
    assert isinstance(found, np.ndarray)
    assert np.array_equal(found, numbers * np.repeat(scales, 16, axis=1))
