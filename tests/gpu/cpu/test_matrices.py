"""The library's matrices against the definition of their formats, in every build that this processor runs."""

import math

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from gpu.checkpoint import QuantizedRows
from gpu.cpu.library import Library, MatrixStruct, Threads, load_library, usable
from gpu.cpu.weights import (
    ALIGNMENT,
    BF16,
    I16,
    K4,
    K5,
    K6,
    LANES,
    U4,
    U5,
    U8,
    PackedMatrix,
    WeightBuffer,
    multiplies_integers,
    pack,
)
from tests.gpu.native_builds import needs_library
from tests.selection import slow_except

pytestmark = needs_library

RUNNABLE = list(usable())


@pytest.fixture(params=slow_except(RUNNABLE, *RUNNABLE[:1]), ids=lambda library: library.name)
def library(request) -> Library:
    return request.param


# Types of 256 weights to a block that `quantize` does not make: the bytes of one, and where its float16 scales are.
SUPER_BLOCKS = {"Q2_K": (84, (80, 82)), "Q4_K": (144, (0, 2)), "Q5_K": (176, (0, 2)), "Q6_K": (210, (208,))}
KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


def rows_of(kind: str, rows: int, cols: int, seed: int = 0) -> QuantizedRows:
    generator = np.random.default_rng(seed)
    if kind not in SUPER_BLOCKS:
        values = generator.normal(0, 0.1, (rows, cols)).astype(np.float32)
        return QuantizedRows(kind, (rows, cols), quantize(values, GGMLQuantizationType[kind]))
    size, scales = SUPER_BLOCKS[kind]
    blocks = generator.integers(0, 256, (rows, cols // 256, size), dtype=np.uint8)
    for at in scales:
        blocks[..., at : at + 2] = (
            generator.uniform(1e-4, 1e-3, blocks.shape[:2]).astype(np.float16)[..., None].view("u1")
        )
    return QuantizedRows(kind, (rows, cols), blocks.reshape(rows, -1))


def product(
    library: Library, matrix: PackedMatrix, x: torch.Tensor, num_threads: int = 1, *, prompt: bool = False
) -> torch.Tensor:
    out = torch.full((len(x), -(-matrix.struct.rows // LANES) * LANES), 7.0)
    threads = Threads(library, num_threads)
    library.functions.hr_multiply(
        threads.handle, matrix.struct, x.data_ptr(), len(x), prompt, None, out.data_ptr(), out.shape[1]
    )
    return out[:, : matrix.struct.rows]


def seen(library: Library, x: torch.Tensor) -> torch.Tensor:
    """What a product takes activations for: bfloat16 where the processor multiplies those."""
    return (x.bfloat16() if library.name in ("_kernels_amx", "_kernels_bf16") else x).double()


def stored(library: Library, matrix: PackedMatrix) -> torch.Tensor:
    """The numbers that a matrix holds, row by row."""
    out = torch.empty(matrix.struct.rows, matrix.struct.cols)
    for index, row in enumerate(out):
        library.functions.hr_matrix_row(matrix.struct, index, row.data_ptr())
    return out


def rounded(library: Library, rows: torch.Tensor) -> PackedMatrix:
    """Rows of floats as a U8 matrix: what becomes of the quantized types that the library has no form for."""
    matrix = PackedMatrix(library, WeightBuffer(), [(U8, len(rows))], rows.shape[1])
    assert library.functions.hr_pack_floats(matrix.struct, rows.data_ptr(), 0, len(rows), 1) == 0
    return matrix


@pytest.mark.parametrize("count", [1, 3, 4, 23])
def test_a_product_of_integers_has_a_tenth_of_the_error_of_bfloat16_and_rows_do_not_depend_on_others(
    library: Library, count: int
):
    if not multiplies_integers(library):
        return
    generator = torch.Generator().manual_seed(3)
    rows, x = (torch.randn(size, 144, generator=generator) for size in (37, count))  # the last block is half full
    rows[5], x[0, 32:64] = 0, 0
    matrix = pack(library, WeightBuffer(), [rows.numpy()], integers=True)
    assert matrix.forms == {I16}
    torch.testing.assert_close(stored(library, matrix), rows, rtol=0, atol=float(rows.abs().max()) / 8191 / 2 * 1.01)
    found, exact = product(library, matrix, x), x.double() @ rows.double().T
    error, bfloat16 = (each.double() - exact for each in (found, (x.bfloat16() @ rows.bfloat16().T)))
    assert error.norm() < 1.5e-4 * exact.norm() < bfloat16.norm() / 10
    for index, row in enumerate(x):
        assert torch.equal(product(library, matrix, row[None])[0], found[index])


def test_numbers_that_are_not_finite_reach_products_of_integers(library: Library):
    if not multiplies_integers(library):
        return
    for number in (math.inf, -math.inf, math.nan):
        rows, x = torch.ones(17, 64), torch.ones(2, 64)
        rows[3, 40] = x[1, 7] = number
        found = product(library, pack(library, WeightBuffer(), [rows.numpy()], integers=True), x)
        finite = torch.isfinite(found)
        assert not finite[1].any()
        assert finite[0].sum() == 16
        assert not finite[0, 3]


def test_the_installation_has_built_the_library_and_it_is_the_best_that_runs_here():
    assert RUNNABLE
    library = load_library()
    assert library is not None
    assert library.name == RUNNABLE[0].name


@pytest.mark.parametrize(("kind", "form"), list(zip(KINDS, (U4, U4, U5, U5, U8, K4, K5, K6), strict=True)))
def test_blocks_of_a_file_are_kept_to_the_last_bit(library: Library, kind: str, form: int):
    rows = rows_of(kind, 37, 512)
    matrix = pack(library, WeightBuffer(), [rows])
    assert matrix.forms == {form}
    expected = torch.from_numpy(dequantize(rows.data, GGMLQuantizationType[kind]))
    torch.testing.assert_close(stored(library, matrix), expected, rtol=1e-6, atol=1e-7)


def mxfp4(rows: int, cols: int, exponents: tuple[int, int] = (104, 143)) -> QuantizedRows:
    """Blocks of a GGUF file at random, with such exponents as fit float16."""
    generator = np.random.default_rng(rows)
    blocks = generator.integers(0, 256, (rows, cols // 32, 17), dtype=np.uint8)
    blocks[..., 0] = generator.integers(exponents[0], exponents[1] + 1, blocks.shape[:2])
    return QuantizedRows("MXFP4", (rows, cols), blocks.reshape(rows, -1))


def with_huge_scales(kind: str, rows: int, cols: int) -> QuantizedRows:
    """Return rows in which some scales are the largest float16."""
    found = rows_of(kind, rows, cols)
    data = found.data.copy().reshape(rows, cols // 32, -1)
    data[::3, :, :2] = np.array([65504.0], np.float16).view(np.uint8)
    return QuantizedRows(kind, found.shape, data.reshape(rows, -1))


@pytest.mark.parametrize(
    ("rows", "form"),
    [
        (mxfp4(37, 96), U8),
        (mxfp4(16, 96, (90, 160)), BF16),
        (with_huge_scales("Q4_0", 37, 96), U8),
        (with_huge_scales("Q5_0", 37, 96), U8),
    ],
    ids=["MXFP4", "MXFP4 beyond float16", "Q4_0", "Q5_0"],
)
def test_what_the_library_has_no_form_for_is_kept_exactly_in_another(library: Library, rows: QuantizedRows, form: int):
    matrix = pack(library, WeightBuffer(), [rows])
    assert matrix.forms == {form}
    assert torch.equal(stored(library, matrix), torch.from_numpy(rows.dequantize()))


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q8_0", "MXFP4", "Q4_1", "Q5_1", "Q4_K"])
def test_q8_0_holds_the_very_numbers_of_types_without_an_offset(kind: str):
    rows = mxfp4(9, 512) if kind == "MXFP4" else rows_of(kind, 9, 512)
    found = rows.as_q8_0()
    assert (found is None) == (kind in ("Q4_1", "Q5_1", "Q4_K"))
    if found is not None:
        assert found.type == "Q8_0"
        assert np.array_equal(found.dequantize(), rows.dequantize())


def test_parts_of_different_types_that_take_turns_are_exact_where_8_bits_hold_them(library: Library):
    parts = [mxfp4(16, 64), rows_of("Q5_0", 16, 64)]
    matrix = pack(library, WeightBuffer(), parts, interleave=True)
    assert matrix.forms == {U8}
    assert torch.equal(stored(library, matrix), torch.cat([torch.from_numpy(part.dequantize()) for part in parts]))


def test_other_quantized_types_are_kept_within_half_a_step_of_8_bits(library: Library):
    rows = rows_of("Q2_K", 20, 256)
    matrix = pack(library, WeightBuffer(), [rows])
    assert matrix.forms == {U8}
    expected = torch.from_numpy(rows.dequantize())
    steps = expected.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
    errors = (stored(library, matrix) - expected).unflatten(-1, (-1, 32)).abs()
    assert (errors <= 0.51 * steps + 1e-7).all()


@pytest.mark.parametrize("size", [1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-42])
def test_small_weights_are_kept_within_half_a_step_too_or_half_of_the_smallest_there_is(library: Library, size: float):
    rows = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)) * size
    kept = stored(library, rounded(library, rows))
    steps = rows.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
    errors = (kept - rows).unflatten(-1, (-1, 32)).abs()
    assert (errors <= 0.51 * steps + 0.5 * 2.0**-24).all()
    assert size < 1e-7 or kept.any()


@pytest.mark.parametrize("place", [0, 5, 31])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_weights_that_are_not_finite_stay_so_when_they_are_rounded(library: Library, place: int, value: float):
    rows = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    rows[3, 32 + place] = value
    matrix = rounded(library, rows)
    assert stored(library, matrix).isfinite().all(-1).tolist() == [row != 3 for row in range(16)]
    assert product(library, matrix, torch.randn(2, 64)).isfinite().all(0).tolist() == [row != 3 for row in range(16)]


def test_parts_lie_below_each_other_or_take_turns(library: Library):
    parts = [rows_of("Q4_1", 32, 64, seed) for seed in (1, 2)]
    a, b = (torch.from_numpy(part.dequantize()) for part in parts)
    torch.testing.assert_close(stored(library, pack(library, WeightBuffer(), parts)), torch.cat((a, b)))
    turns = torch.cat((a[:16], b[:16], a[16:], b[16:]))
    torch.testing.assert_close(stored(library, pack(library, WeightBuffer(), parts, interleave=True)), turns)


def test_parts_of_different_types_keep_their_forms(library: Library):
    parts, last = [rows_of("Q4_K", 32, 256), rows_of("Q6_K", 16, 256)], torch.randn(21, 256).bfloat16().float()
    matrix = pack(library, WeightBuffer(), [*parts, last.numpy()])
    assert matrix.forms == {K4, K6, BF16}
    numbers = torch.cat([*(torch.from_numpy(part.dequantize()) for part in parts), last])
    torch.testing.assert_close(stored(library, matrix), numbers)
    x = torch.randn(40, 256)
    torch.testing.assert_close(
        product(library, matrix, x).double(), seen(library, x) @ numbers.double().T, rtol=1e-5, atol=1e-4
    )


def test_parts_of_different_types_that_take_turns_share_one_form(library: Library):
    quantized = pack(library, WeightBuffer(), [rows_of("Q4_1", 16, 64), rows_of("Q8_0", 16, 64)], interleave=True)
    mixed = pack(library, WeightBuffer(), [rows_of("Q4_1", 16, 64), np.zeros((16, 64), np.float32)], interleave=True)
    assert (quantized.forms, mixed.forms) == ({U8}, {BF16})
    uneven = pack(library, WeightBuffer(), [rows_of("Q4_1", 10, 64), rows_of("Q8_0", 16, 64)])
    assert uneven.forms == {U8}, "the second begins in the middle of a tile"


@pytest.mark.parametrize("num_rows", [1, 3, 8, 21, 150, 530])
@pytest.mark.parametrize("kind", [*KINDS, "bfloat16"])
def test_products_are_those_of_the_stored_numbers(library: Library, kind: str, num_rows: int):
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, 512, generator=generator)
    weight = torch.randn(53, 512, generator=generator).numpy() if kind == "bfloat16" else rows_of(kind, 53, 512)
    matrix = pack(library, WeightBuffer(), [weight])
    numbers = stored(library, matrix).double()
    expected, size = seen(library, x) @ numbers.T, seen(library, x).abs() @ numbers.abs().T
    exact = product(library, matrix, x, num_threads=2).double()
    assert ((exact - expected).abs() <= 1e-6 * size).all()
    # Of prompts, weights may be rounded to bfloat16: half a unit of 8 bits each, mostly up and down alike.
    rounded_too = product(library, matrix, x, num_threads=2, prompt=True).double()
    assert ((rounded_too - expected).abs() <= 2**-9 * size).all()
    assert (rounded_too - expected).norm() <= 3e-3 * expected.norm()


@pytest.mark.parametrize("num_cols", [16, 48, 80])
def test_inputs_that_fill_no_block_are_multiplied_too(library: Library, num_cols: int):
    x, weight = torch.randn(20, num_cols), torch.randn(32, num_cols).bfloat16().float()
    matrix = pack(library, WeightBuffer(), [weight.numpy()])
    expected = seen(library, x) @ weight.double().T
    for prompt in (False, True):
        result = product(library, matrix, x, prompt=prompt).double()
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "bfloat16"])
def test_a_rows_product_is_the_same_bits_in_any_batch(library: Library, kind: str, prompt: bool):
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(1))
    x[7, ::3] *= 2.0**-120  # next to nothing, where vectors and tiles must not differ
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(2)).numpy()
    matrix = pack(library, WeightBuffer(), [weight if kind == "bfloat16" else rows_of(kind, 64, 256)])
    together = product(library, matrix, x, prompt=prompt)
    for count in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33):
        assert torch.equal(product(library, matrix, x[:count].contiguous(), prompt=prompt), together[:count])
        assert torch.equal(product(library, matrix, x[-count:].contiguous(), prompt=prompt), together[-count:])


def test_a_bias_is_added(library: Library):
    matrix = pack(library, WeightBuffer(), [rows_of("Q4_1", 32, 64)])
    x, bias, out = torch.randn(3, 64), torch.randn(32), torch.empty(3, 32)
    threads = Threads(library, 1)
    library.functions.hr_multiply(
        threads.handle, matrix.struct, x.data_ptr(), 3, False, bias.data_ptr(), out.data_ptr(), out.shape[1]
    )
    torch.testing.assert_close(out, product(library, matrix, x) + bias)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_largest_product_is_the_first_of_several_and_what_is_not_finite_is_told(library: Library, num_threads: int):
    weight = torch.randn(70, 32, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    weight[61] = weight[9]
    matrix = pack(library, WeightBuffer(), [weight.numpy()])
    x = torch.cat((weight[9:10] * 50, torch.randn(20, 32)))
    x[5, 3], x[6, 0] = float("nan"), float("inf")
    indices, finite = np.empty(21, np.int64), np.empty(21, np.bool_)
    threads = Threads(library, num_threads)
    library.functions.hr_largest_product(
        threads.handle, matrix.struct, x.data_ptr(), 21, 0, indices.ctypes.data, finite.ctypes.data
    )
    assert indices[0] == 9
    assert finite.tolist() == [row not in (5, 6) for row in range(21)]
    rest = product(library, matrix, x)[finite]
    assert indices[finite].tolist() == rest.argmax(-1).tolist()


def test_a_buffer_hands_out_zeroed_aligned_pieces_that_do_not_overlap():
    buffer = WeightBuffer()
    pieces = [buffer.take(size) for size in (1, 63, 64, 65, 40 * 2**20, 7)]
    for value, piece in enumerate(pieces, 1):
        assert piece.ctypes.data % ALIGNMENT == 0
        assert not piece.any()
        piece.fill(value)
    assert all((piece == value).all() for value, piece in enumerate(pieces, 1))


@pytest.mark.parametrize("place", [0, 1, 17, 31, 95])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_among_the_inputs_is_not_finite_among_the_outputs(
    library: Library, place: int, value: float
):
    x = torch.randn(2, 96)
    x[1, place] = value
    out = product(library, pack(library, WeightBuffer(), [rows_of("Q4_1", 16, 96)]), x)
    assert out[0].isfinite().all()
    assert not out[1].isfinite().any()


@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-20])
def test_inputs_too_small_to_divide_by_are_nothing_and_spare_the_others(library: Library, size: float):
    x = torch.zeros(1, 96)
    x[0, :32], x[0, 40] = size, 1.0
    matrix = pack(library, WeightBuffer(), [rows_of("Q4_1", 16, 96)])
    expected = seen(library, x) @ stored(library, matrix).double().T
    torch.testing.assert_close(product(library, matrix, x).double(), expected, rtol=1e-5, atol=1e-12)


def test_what_has_no_form_is_refused(library: Library) -> None:
    matrix = MatrixStruct(rows=16, cols=32)
    with pytest.raises(ValueError, match="hr_pack_blocks does not know this form or type"):
        library.functions.hr_pack_blocks(matrix, 99, None, 0, 0, 16, 1)
