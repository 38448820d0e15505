"""Linear layers on the numbers of a quantized checkpoint, against the weights that they mean, in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from gpu.attention import TritonAttention
from gpu.checkpoint import open_model
from gpu.checkpoint.families.table import spec_of
from gpu.checkpoint.quantized_layers import QuantizedLayer, quantized_checkpoint
from gpu.checkpoint.quantized_rows import PackedRows
from gpu.kernels import prefill
from gpu.kernels.quantized import MOST_ROWS, QuantizedLinear, quantize_rows, quantized_linear
from gpu.models.decoder import CausalLM
from gpu.models.layers import Linear
from gpu.sharding import Layout, sharded
from gpu.weights.reading import floats, read_weights
from gpu.weights.tensors import QuantizedMatrix, as_tensors, weights_of
from tests.gpu.checkpoint.test_quantized_layers import write
from tests.gpu.kernels.test_model import BLOCK_SIZE, STEPS
from tests.gpu.paging import make_metadata, positions_of
from tests.gpu.quantized_checkpoints import FORMATS, Format, compressed, fp8, gptq
from tests.selection import slow_except

OF_INTEGERS = [name for name in FORMATS if "FP" not in name and "bitsandbytes" not in name]
OF_FP8 = [name for name in FORMATS if "FP8" in name]


def packed_rows(form: Format, weight: torch.Tensor) -> tuple[PackedRows, torch.Tensor]:
    """A layer as a file of this format has it, and the weights that it means."""
    storage = quantized_checkpoint(form.config, "a file").storage_of("layer")
    assert storage is not None
    written = form.write(weight)
    arrays = {}
    for name, tensor in written.tensors.items():
        narrow = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}.get(tensor.dtype, tensor.dtype)
        arrays[name] = tensor.contiguous().view(narrow).numpy()
    rows = QuantizedLayer("layer", storage, arrays).packed()
    assert rows is not None
    return rows, written.meant


def packed_matrix(form: Format, weight: torch.Tensor) -> tuple[QuantizedMatrix, torch.Tensor]:
    rows, meant = packed_rows(form, weight)
    [(_, matrix)] = as_tensors([("layer", rows)])
    assert isinstance(matrix, QuantizedMatrix)
    return matrix, meant


@pytest.fixture
def without_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that does not multiply E4M3, such as an A100."""
    monkeypatch.setattr(prefill, "capability_of", lambda device: (8, 0))


@pytest.mark.parametrize("name", [*OF_INTEGERS, *OF_FP8])
def test_a_matrix_is_packed_to_the_bit(name: str):
    matrix, meant = packed_matrix(FORMATS[name], torch.randn(96, 192) / 14)
    values = matrix.dequantize()
    assert matrix.shape == meant.shape
    assert torch.equal(values, meant if matrix.order is None else meant[:, matrix.order])
    assert (matrix.order is not None) == ("act-order" in name and "one group" not in name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("rows", slow_except([1, 20, 130, 520], 20))
@pytest.mark.parametrize("name", slow_except([*OF_INTEGERS, *OF_FP8], "AWQ", "GPTQ 3 bits", "FP8, 128 x 128"))
@pytest.mark.usefixtures("without_e4m3")
def test_rows_meet_the_weights_that_a_file_means(name: str, rows: int, dtype: torch.dtype):
    matrix, meant = packed_matrix(FORMATS[name], torch.randn(96, 192) / 14)
    x = torch.randn(rows, 192).to(dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-3
    wanted = x.double() @ meant.double().T
    torch.testing.assert_close(quantized_linear(x, matrix).double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows", slow_except([1, 20, 70, 520], 20))
@pytest.mark.parametrize("name", slow_except(OF_FP8, "FP8, 128 x 128", "compressed-tensors FP8, per channel"))
@pytest.mark.usefixtures("right_e4m3")
def test_activations_of_fp8_are_rounded_by_row_and_group(name: str, rows: int):
    matrix, meant = packed_matrix(FORMATS[name], torch.randn(80, 192) / 14)
    x = (torch.randn(rows, 192) * torch.rand(rows, 1) * 9).half()
    rounded, scales = quantize_rows(x, matrix.group)
    size = matrix.group or 192
    parts = x.float().split(size, 1)
    assert scales.shape == (rows, len(parts))
    torch.testing.assert_close(scales, torch.stack([part.abs().amax(1) / 448 for part in parts], 1))
    meant_x = rounded.double() * scales.repeat_interleave(size, 1)[:, :192]
    assert ((meant_x - x).abs() <= x.abs() / 15 + 2**-9 * scales.max()).all()
    wanted = meant_x @ meant.double().T
    tolerance = 4e-3 if rows <= MOST_ROWS else 1e-2  # cuBLAS takes weights and activations in 16 bits
    torch.testing.assert_close(quantized_linear(x, matrix).double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("without_e4m3")
def test_parts_of_one_form_are_one_product_and_others_are_side_by_side():
    forms = [gptq(4, act_order=True), gptq(4, act_order=True), compressed("w8a16"), gptq(4)]
    made = [packed_matrix(form, torch.randn(size, 128)) for form, size in zip(forms, (48, 16, 32, 16), strict=True)]
    plain = torch.randn(24, 128)
    layer = QuantizedLinear([*(matrix for matrix, _ in made), plain])
    assert [part.shape[0] for part in layer.parts] == [64, 32, 16, 24]
    x, bias = torch.randn(3, 128), torch.randn(136)
    wanted = x @ torch.cat([*(meant for _, meant in made), plain]).T + bias
    torch.testing.assert_close(layer(x, bias), wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.usefixtures("right_e4m3")
def test_a_row_that_is_not_finite_keeps_it_to_itself():
    for form in (gptq(4), fp8("block"), compressed("fp8")):
        matrix, _ = packed_matrix(form, torch.randn(32, 128))
        x = torch.randn(20, 128)
        x[7, 100] = torch.nan
        assert quantized_linear(x, matrix).isfinite().all(1).logical_not().nonzero().tolist() == [[7]]
        assert quantized_linear(x[:0], matrix).shape == (0, 32)


def test_rows_that_no_kernel_takes_become_plain_ones():
    rows, meant = packed_rows(gptq(4, 8), torch.randn(16, 64))
    [(_, plain)] = as_tensors([("layer", rows)])
    assert isinstance(plain, torch.Tensor)
    assert torch.equal(plain, meant)


@pytest.mark.parametrize("name", ["FP8, 128 x 128", "GPTQ 4 bits", "GPTQ 4 bits, act-order", "AWQ"])
@pytest.mark.parametrize("ranks", slow_except([2, 5], 5))
def test_a_rank_packs_its_part_where_groups_are_whole(tmp_path: Path, name: str, ranks: int):
    meant = write(tmp_path / "model", FORMATS[name])
    files = open_model(str(tmp_path / "model"))
    layout = Layout(tensor_parallel_size=1)
    spec = replace(sharded(spec_of(files.config), layout, gathers=False), keeps_packed=True)
    key = "model.layers.0.mlp.down_proj.weight"
    whole = dict(read_weights(files, spec))[key]
    assert isinstance(whole, PackedRows)
    size = 320 // ranks
    part = whole[:, size : 2 * size]
    assert torch.equal(torch.from_numpy(floats(part)), meant[key][:, size : 2 * size])
    assert (part.fields() is not None) == ("128" in name or (ranks == 5 and "act" not in name))


LOGITS = [*OF_INTEGERS, *OF_FP8]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOGITS)
@pytest.mark.usefixtures("without_e4m3")
def test_a_model_with_packed_layers_gives_the_logits_of_their_weights(tmp_path: Path, name: str):
    write(tmp_path / "model", FORMATS[name])
    files = open_model(str(tmp_path / "model"))
    found = []
    for keeps_packed in (False, True):
        spec = replace(spec_of(files.config), keeps_packed=keeps_packed)
        attention = partial(TritonAttention, block_size=BLOCK_SIZE)
        model = CausalLM(
            files.config, dtype=torch.float32, device="cpu", max_model_len=64, attention=attention, spec=spec
        )
        model.load_weights(weights_of(files, "cpu", spec))
        linears = [layer for layer in model.modules() if isinstance(layer, Linear)]
        assert any(layer.is_quantized for layer in linears) == keeps_packed
        caches = model.allocate_kv_cache(8, torch.float32, torch.device("cpu"))
        spans = STEPS[0]
        tokens = torch.arange(11) * 7 % files.config.vocab_size
        with torch.inference_mode():
            hidden = model(tokens, positions_of(spans), [make_metadata(spans, BLOCK_SIZE)], caches)
            found.append(model.compute_logits(hidden))
    torch.testing.assert_close(found[1], found[0], atol=2e-4, rtol=2e-4)
