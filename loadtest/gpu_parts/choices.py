"""What `gpu.device.choices` decides on this card, and what each choice is worth to some layers and the head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from gpu.attention import TritonAttention
from gpu.checkpoint import ModelConfig
from gpu.device.choices import choose_products, decode_step, overlap_agrees, seconds_of_graphs
from gpu.device.graphs import CudaGraphs, Graphs, Replay
from gpu.kernels.product import MAX_ROWS, TILES
from gpu.models.decoder import CausalLM
from gpu.models.layers import Product
from gpu.weights.tensors import drawn_on
from loadtest.gpu_parts.report import Report
from loadtest.gpu_parts.rooflines import Card, ModelWork
from loadtest.gpu_parts.timing import Timer

LAYERS = 4  # enough that their weights do not stay in the cache from one step to the next
BLOCK_SIZE = 16


class NoGraphs:
    """Of a device that has none."""

    def capture(self, run: Callable[[], None]) -> Replay:
        return run


def choices(report: Report, timer: Timer, card: Card, dtype: torch.dtype, name: str, config: ModelConfig) -> None:
    """Microseconds of a step by cuBLAS and by each tile, with kernels that overlap and without; then what is chosen."""
    config = replace(config, num_hidden_layers=LAYERS)
    attention = partial(TritonAttention, block_size=BLOCK_SIZE)
    model = CausalLM(config, dtype=dtype, device=timer.device, max_model_len=BLOCK_SIZE, attention=attention)
    model.load_weights(drawn_on(config, str(timer.device)))
    graphs: Graphs = CudaGraphs(timer.device) if timer.on_cuda else NoGraphs()
    turn = _turn(timer.device)
    if not overlap_agrees(model, dtype, BLOCK_SIZE, timer.device, graphs, turn):
        report.fail(f"{name}: kernels that overlap give other bits")
    for rows in (1, MAX_ROWS):
        floor = ModelWork(config).decode_floor(card, rows, 1) * 1e6
        for overlap in (False, True):
            turn(overlap)
            for tile in (None, *TILES):
                for layer in model.modules():
                    if isinstance(layer, Product):
                        layer.tile = tile
                _, _, run = decode_step(model, rows, dtype, BLOCK_SIZE, timer.device)
                by = "cuBLAS" if tile is None else f"{tile.outputs} outputs at a time"
                what = f"{LAYERS} layers and head, {rows} rows, {by}{', overlapping' * overlap}"
                report.add(name, what, timer.seconds(graphs.capture(run)) * 1e6, "us", floor)
    if timer.on_cuda:
        report.note(f"{name}: chosen of {choose_products(model, partial(seconds_of_graphs, graphs))}")
    turn(False)


def _turn(device: torch.device) -> Callable[[bool], None]:
    """What lets kernels overlap, where the card can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return lambda on: None
    from gpu.kernels.jit import dependent

    return dependent.turn
