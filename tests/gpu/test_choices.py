"""What only a card can tell, told by a card that is made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from gpu.device import choices
from gpu.device.choices import choose_products, overlap_agrees, seconds_of_graphs
from gpu.device.runner import DeviceRunner
from gpu.kernels.jit import dependent
from gpu.kernels.product import TILES, linear
from gpu.kernels.shapes import Tile
from gpu.models.decoder import CausalLM
from gpu.models.layers import Product
from gpu.models.torch_model import TorchModel
from tests.gpu.device_runners import BLOCK_SIZE, CPU, Again, make_executor


def make_model(dtype: torch.dtype = torch.bfloat16) -> CausalLM:
    runner = make_executor("device", Again()).runner
    assert isinstance(runner, DeviceRunner)
    assert isinstance(runner._model, CausalLM)
    return runner._model.to(dtype)


def products(model: CausalLM) -> list[Product]:
    return [layer for layer in model.modules() if isinstance(layer, Product)]


def test_each_shape_gets_what_is_clearly_faster_for_it() -> None:
    model = make_model()
    shapes = list(dict.fromkeys(layer.weight.shape for layer in products(model)))
    given = iter([[5.0, 6.0, 4.0, 4.5], [1.0, 0.98, 0.99, 1.5], *[[1.0, 2.0, 2.0, 0.5]] * len(shapes)])
    counts = []

    def seconds(runs: Sequence[Callable[[], None]]) -> list[float]:
        counts.append(len(runs))
        for run in runs:
            run()  # what is not on a card is cuBLAS's in any case
        return next(given)

    told = choose_products(model, seconds)
    wanted = dict(zip(shapes, [TILES[1], None, *[TILES[2]] * len(shapes)], strict=False))
    assert [layer.tile for layer in products(model)] == [wanted[layer.weight.shape] for layer in products(model)]
    assert counts == [1 + len(TILES)] * len(shapes)
    assert told.count(" by ") == len(shapes)
    assert f"{shapes[1][0]} x {shapes[1][1]} by cuBLAS" in told


def test_what_is_wrong_is_not_chosen_however_fast_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile | None) -> torch.Tensor:
        return linear(x if tile is None else x.roll(1, 0), weight, bias, tile)

    monkeypatch.setattr(choices, "linear", wrong)
    model = make_model()
    choose_products(model, lambda runs: [1.0 / (1 + place) for place in range(len(runs))])
    assert {layer.tile for layer in products(model)} == {None}


def test_matrices_of_32_bits_are_left_to_cublas() -> None:
    def never(runs: Sequence[Callable[[], None]]) -> list[float]:
        raise AssertionError

    model = make_model(torch.float32)
    choose_products(model, never)
    assert {layer.tile for layer in products(model)} == {None}


def test_what_cannot_run_is_never_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        record = synchronize = staticmethod(lambda: None)

        def __init__(self, enable_timing: bool) -> None: ...

        def elapsed_time(self, end: Event) -> float:
            return 2.0

    def too_large() -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert seconds_of_graphs(Again(), [too_large, lambda: None]) == [float("inf"), 2e-3]


@pytest.mark.parametrize("late", [False, True])
@torch.inference_mode()
def test_kernels_overlap_only_where_that_changes_no_bit(late: bool) -> None:
    model = make_model(torch.float32)
    turned: list[bool] = []

    def turn(on: bool) -> None:
        turned.append(on)
        if on and late:  # something is read before it is there: a bit is another
            products(model)[-2].weight[3, 5] *= 1.0001

    agrees = overlap_agrees(model, torch.float32, BLOCK_SIZE, CPU, Again(), turn)
    assert agrees is not late
    assert turned == [False, True]


@pytest.mark.parametrize(
    ("capability", "fails", "overlaps"), [((8, 0), False, False), ((9, 0), False, True), ((9, 0), True, False)]
)
def test_a_card_serves_without_overlap_where_it_cannot_have_it(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    fails: bool,
    overlaps: bool,
) -> None:
    def turn(on: bool) -> None:
        turned.append(on)
        if fails and len(turned) == 2:
            raise RuntimeError("programmatic launch is not supported")

    turned: list[bool] = []
    monkeypatch.setattr(choices, "CudaGraphs", lambda device: Again())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(choices, "seconds_of_graphs", lambda graphs, runs: [1.0] * len(runs))
    monkeypatch.setattr(dependent, "turn", turn)
    model = make_model()
    with caplog.at_level("INFO"):
        choices.choose_kernels(TorchModel(model, torch.bfloat16, CPU, block_size=BLOCK_SIZE), BLOCK_SIZE)
    assert turned[-1] is overlaps
    assert {layer.tile for layer in products(model)} == {None}
    assert f"kernels of a step {'overlap' if overlaps else 'do not overlap'}; products" in caplog.text
