"""Weights that are rounded at load, against the definitions of their blocks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from engine.errors import ConfigError
from gpu.checkpoint import ModelConfig, QuantizedRows
from gpu.checkpoint.tensors import Weight
from gpu.weights.quantization import Quantization
from gpu.weights.reading import dummy_weights, floats
from tests.gpu.checkpoint_files import TINY

NAME = "model.layers.0.mlp.up_proj.weight"
BITS = {"int8": ("Q8_0", None), "int4": ("Q4_1", "Q8_0")}  # of most matrices, and of those in `FINER`
FINER = {"int8": ("embed_tokens", "lm_head"), "int4": ("embed_tokens", "lm_head", "k_proj", "v_proj")}


def rounded(how: str, weight: np.ndarray, name: str = NAME) -> QuantizedRows:
    ((_, result),) = Quantization(how, TINY).applied_to([(name, weight)])
    assert isinstance(result, QuantizedRows)
    assert result.shape == weight.shape
    return result


def normal(*shape: int, size: float = 0.1) -> np.ndarray:
    return np.random.default_rng(3).normal(0, size, shape).astype(np.float32)


def blocks(weight: np.ndarray) -> np.ndarray:
    return weight.reshape(-1, 32)


@pytest.mark.parametrize("size", [10.0, 1e-1, 1e-3, 1e-5])
def test_8_bits_are_within_half_a_step_of_a_127th_of_a_blocks_largest(size: float) -> None:
    weight = normal(40, 96, size=size)
    kept = blocks(rounded("int8", weight).dequantize())
    step = np.abs(blocks(weight)).max(-1, keepdims=True) / 127
    assert (np.abs(kept - blocks(weight)) <= 0.51 * step + 0.5 * 2.0**-24).all()


@pytest.mark.parametrize("size", [10.0, 1e-1, 1e-3])
def test_4_bits_are_nearer_than_rounding_between_the_least_and_the_largest(size: float) -> None:
    weight = normal(40, 96, size=size)
    plain = QuantizedRows("Q4_1", weight.shape, quantize(weight, GGMLQuantizationType.Q4_1)).dequantize()
    errors = [np.square(numbers - weight).mean() for numbers in (rounded("int4", weight).dequantize(), plain)]
    assert errors[0] < 0.9 * errors[1]


@pytest.mark.parametrize("how", BITS)
def test_what_a_block_can_hold_is_held(how: str) -> None:
    weight = np.zeros((16, 64), np.float32)
    weight[1] = 0.25
    weight[2, ::2] = -0.5
    weight[3] = np.tile(np.arange(16) / 16 - 0.5, 4)
    kept = rounded(how, weight).dequantize()
    np.testing.assert_allclose(kept, weight, rtol=0, atol=2e-3 if how == "int8" else 1e-3)
    assert not kept[0].any()


@pytest.mark.filterwarnings("ignore:invalid value")  # of the gguf library, which multiplies infinity by zero
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
@pytest.mark.parametrize("how", BITS)
def test_what_is_not_finite_stays_so_in_its_block_alone(how: str, value: float) -> None:
    weight = normal(4, 96)
    weight[2, 40] = value
    finite = np.isfinite(blocks(rounded(how, weight).dequantize())).all(-1)
    assert finite.tolist() == [block != 2 * 3 + 1 for block in range(12)]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.uint16])
def test_every_type_of_a_file_is_taken(dtype: type) -> None:
    weight = normal(33, 64)
    given = (weight.view(np.uint32) >> 16).astype(np.uint16) if dtype is np.uint16 else weight.astype(dtype)
    np.testing.assert_array_equal(rounded("int8", given).data, rounded("int8", floats(given)).data)


@pytest.mark.parametrize("rows", [1, 5000])
@pytest.mark.parametrize("how", BITS)
def test_a_row_is_rounded_alike_wherever_it_stands(how: str, rows: int) -> None:
    weight = np.tile(normal(1, 64), (rows, 1))
    assert len(np.unique(rounded(how, weight).data, axis=0)) == 1


def of_a_model(config: ModelConfig, how: str) -> Iterator[tuple[str, Weight, Weight]]:
    quantization = Quantization(how, config)
    pairs = zip(dummy_weights(config), quantization.applied_to(dummy_weights(config)), strict=True)
    for (name, before), (same_name, after) in pairs:
        assert name == same_name
        yield name, before, after
    assert quantization.relative_error == pytest.approx({"int8": 0.006, "int4": 0.075}[how], rel=0.2)


@pytest.mark.parametrize("how", BITS)
def test_matrices_are_rounded_some_to_the_next_finer_form_and_all_else_is_left(how: str) -> None:
    for name, before, after in of_a_model(TINY, how):
        kind = BITS[how][name.split(".")[-2] in FINER[how]]
        assert isinstance(before, np.ndarray)
        if before.ndim == 1 or kind is None:
            assert isinstance(after, np.ndarray)
            np.testing.assert_array_equal(before, after)
        else:
            assert isinstance(after, QuantizedRows)
            assert after.type == kind


def test_rows_that_are_no_blocks_are_left() -> None:
    weight = normal(16, 48)
    ((_, after),) = Quantization("int8", TINY).applied_to([(NAME, weight)])
    assert after is weight


def test_what_is_quantized_already_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"quantization is int4: .*up_proj.* has Q8_0 already.*quantization=none"):
        list(Quantization("int4", TINY).applied_to([(NAME, rounded("int8", normal(16, 64)))]))
