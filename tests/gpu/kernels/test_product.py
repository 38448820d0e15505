"""The matrix product for few rows, against float64, and against itself in other company."""

import pytest
import torch

from gpu.kernels import linear
from gpu.kernels.product import MAX_ROWS, TILES

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    ("rows", "in_size", "out_size"), [(1, 512, 40), (3, 1100, 17), (MAX_ROWS, 96, 64), (MAX_ROWS + 1, 96, 8), (0, 8, 8)]
)
def test_few_rows_times_a_matrix(rows, in_size, out_size, tile, dtype):
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((rows, in_size), (out_size, in_size), (out_size,)))
    weight /= in_size**0.5
    for added in (None, bias):
        wanted = x.double() @ weight.double().T + (0.0 if added is None else added.double())
        actual = linear(x, weight, added, tile)
        torch.testing.assert_close(actual.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_row_is_the_same_bits_whatever_stands_beside_it(form):
    # The bits are what the kernel promises. torch adds in another order for other numbers of rows, and by other
    # instructions: a sum of 700 products of size 1 is then off by 1e-5 or so, near zero too.
    bound = 1e-3 if form == "reference" else 0.0
    x, weight = torch.randn(MAX_ROWS, 700), torch.randn(24, 700)
    together = linear(x, weight, None, TILES[0])
    for rows in range(1, MAX_ROWS):
        torch.testing.assert_close(linear(x[-rows:], weight, None, TILES[0]), together[-rows:], rtol=0.0, atol=bound)


def test_an_output_knows_no_weight_but_its_own():
    x, weight = torch.randn(2, 100), torch.ones(20, 100)
    weight[3, 0] = float("nan")
    assert linear(x, weight, None, TILES[2]).isfinite().all(0).logical_not().nonzero().tolist() == [[3]]
