"""What goes to the device through two small buffers arrives whole, whatever its size and type."""

from functools import partial

import pytest
import torch

from gpu.attention import TorchAttention
from gpu.checkpoint import open_model
from gpu.checkpoint.tensors import tensor_shapes
from gpu.models.decoder import CausalLM
from gpu.weights.reading import dummy_weights
from gpu.weights.tensors import _Buffers, as_tensors, to_device, weights_of
from tests.gpu.checkpoint_files import TINY, TinyGGUF, random_weights
from tests.gpu.test_executor import CONFIG

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (8, 8), (7, 13), (64, 33)])
def test_every_byte_of_a_tensor_arrives(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 200 - 100).to(dtype)
    for buffer_size in (16, 256, 2**20):  # smaller than the tensor, a part of it, larger
        buffers = _Buffers(CPU, buffer_size)
        for source in (tensor, tensor.clone()):  # twice, so that the buffers are used again
            copy = buffers.copy(source)
            assert copy.dtype == dtype
            assert copy.shape == shape
            assert torch.equal(copy, source)
            assert copy.is_contiguous()


def test_a_view_arrives_as_what_it_shows() -> None:
    whole = torch.arange(60.0).reshape(6, 10)
    for view in (whole.t(), whole[1:4, 2:7], whole[::2]):
        assert torch.equal(_Buffers(CPU, 32).copy(view), view)


def test_tensors_come_one_at_a_time_and_what_is_there_passes() -> None:
    drawn = []

    def weights():
        for number in range(3):
            drawn.append(number)
            yield f"w{number}", torch.full((2,), number)

    arriving = to_device(weights(), CPU)
    assert drawn == []
    assert next(arriving)[0] == "w0"
    assert drawn == [0]
    tensor = torch.ones(3)
    assert next(to_device([("here", tensor)], CPU))[1] is tensor


def test_a_file_is_read_to_another_device_with_progress(tmp_path) -> None:
    """The meta device takes copies of no bytes, so that the way there is tried without a card."""
    path = TinyGGUF(tmp_path / "m.gguf").add_weights(random_weights(TINY)).save()
    reports = []
    files = open_model(str(path), progress=lambda *report: reports.append(report))
    weights = dict(weights_of(files, "meta"))
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == tensor_shapes(TINY)
    assert all(tensor.device.type == "meta" for tensor in weights.values())
    assert reports[-1] == ("Loading weights", len(weights), len(weights))


def test_a_model_loads_what_was_staged() -> None:
    def model():
        attention = partial(TorchAttention, block_size=4)
        return CausalLM(CONFIG, dtype=torch.float32, device=CPU, max_model_len=8, attention=attention)

    buffers = _Buffers(CPU, 100)
    plain, staged = model(), model()
    plain.load_weights(as_tensors(dummy_weights(CONFIG)))
    staged.load_weights((name, buffers.copy(tensor)) for name, tensor in as_tensors(dummy_weights(CONFIG)))
    for (name, expected), (_, found) in zip(plain.named_parameters(), staged.named_parameters(), strict=True):
        assert torch.equal(found, expected), name
