"""Which kernels a card runs, found out on the card before anything is captured or served. Used by `warm_up`.

Two things no reading can tell: whether a matrix is multiplied by a few rows faster by cuBLAS or by the kernel of
`gpu.kernels.product`, and whether kernels may be started before their predecessors have ended
(`gpu.kernels.jit.dependent`) with this driver.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch

from gpu.attention import AttentionMetadata
from gpu.device.graphs import CudaGraphs, Graphs, Replay, agreed, all_ranks
from gpu.kernels import linear
from gpu.kernels.product import MAX_ROWS, TILES
from gpu.kernels.shapes import Tile
from gpu.kv_cache import kv_layout
from gpu.models.decoder import CausalLM
from gpu.models.layers import Product
from gpu.models.torch_model import TorchModel
from gpu.sharding import Communicator

logger = logging.getLogger(__name__)

TURNS = 5  # of each that is measured, of which the fastest counts
CLEARLY_FASTER = 0.97  # what is not is left to cuBLAS: so chance seldom decides, which would show in the last bits
TRIED_STEPS = 16

Seconds = Callable[[Sequence[Callable[[], None]]], list[float]]


@torch.inference_mode()
def choose_kernels(model: TorchModel, block_size: int) -> None:
    """With the weights in place, and memory for a step. Takes some seconds where kernels must be compiled first, and
    else as long as reading all weights fifty times. Tensor ranks, all of which call it, choose the same."""
    from gpu.kernels.jit import dependent

    communicator = model.model.communicator
    graphs = CudaGraphs(model.device)
    of_all = agreed(graphs, communicator, model.device)
    overlap = torch.cuda.get_device_capability(model.device) >= (9, 0)
    if overlap:
        try:
            overlap = overlap_agrees(model.model, model.dtype, block_size, model.device, of_all, dependent.turn)
        except Exception:
            overlap = False
            logger.warning("kernels that overlap cannot be started here", exc_info=True)
    overlap = all_ranks(overlap, communicator, model.device)
    dependent.turn(overlap)
    chosen = choose_products(model.model, partial(seconds_of_graphs, graphs))
    if communicator is not None:
        agree_on_products(model.model, communicator, model.device)
    logger.info(
        "kernels of a step %s; products of up to %d rows, microseconds of each by the kernel and by cuBLAS: %s",
        "overlap" if overlap else "do not overlap",
        MAX_ROWS,
        chosen,
    )


def choose_products(model: CausalLM, seconds: Seconds) -> str:
    """Give each matrix its tile, or none. All of one shape get the same, for all numbers of rows, so that a row's bits
    do not depend on how many there are. Returns what was found, for the log.

    All matrices of a shape are read one after the other, as in a step: one alone would stay in the cache.
    """
    shapes: dict[torch.Size, list[Product]] = defaultdict(list)
    for layer in _products(model):
        shapes[layer.weight.shape].append(layer)
    found = []
    for shape, layers in shapes.items():
        inputs = [layers[0].weight.new_empty(rows, shape[1]).normal_() for rows in (1, MAX_ROWS)]
        cublas, *by_tile = seconds([partial(_multiply, layers, inputs, tile) for tile in (None, *TILES)])
        best = min(by_tile)
        tile: Tile | None = TILES[by_tile.index(best)]
        if best > CLEARLY_FASTER * cublas or not _is_right(layers[0], inputs[-1], tile):
            tile = None
        for layer in layers:
            layer.tile = tile
        name = "cuBLAS" if tile is None else f"{tile.outputs} outputs at a time"
        count = len(layers) * len(inputs) / 1e6
        found.append(f"{shape[0]} x {shape[1]} by {name} ({best / count:.1f}, {cublas / count:.1f})")
    return ", ".join(found) or "none of 16 bits"


def agree_on_products(model: CausalLM, communicator: Communicator, device: torch.device) -> None:
    """Use the tiles of tensor rank 0 on all ranks, so that results do not depend on which rank computes a part of a
    matrix. All ranks call it; they have the same matrices in the same order."""
    layers, kinds = _products(model), [None, *TILES]
    if layers:
        own = torch.tensor([[float(kinds.index(layer.tile)) for layer in layers]], device=device)
        chosen = communicator.all_gather(own, [len(layers)] * communicator.size)[0, : len(layers)].tolist()
        for layer, kind in zip(layers, chosen, strict=True):
            layer.tile = kinds[int(kind)]


def _products(model: CausalLM) -> list[Product]:
    """Those that the kernel may make: of 16 bits, which is what a matrix instruction takes without rounding."""
    return [layer for layer in model.modules() if isinstance(layer, Product) and layer.weight.itemsize == 2]


def _multiply(layers: list[Product], inputs: list[torch.Tensor], tile: Tile | None) -> None:
    for x in inputs:
        for layer in layers:
            linear(x, layer.weight, layer.bias, tile)


def _is_right(layer: Product, x: torch.Tensor, tile: Tile | None) -> bool:
    """Whether the kernel gives what cuBLAS does, but for rounding: compilers and cards are many."""
    product, wanted = (linear(x, layer.weight, layer.bias, kind).float() for kind in (tile, None))
    return bool((product - wanted).norm() <= 0.02 * wanted.norm())


def seconds_of_graphs(graphs: Graphs, runs: Sequence[Callable[[], None]]) -> list[float]:
    """What each takes on the device: the least of some turns, each a graph, because starting them one by one would take
    longer. Infinite for what cannot run here."""
    replays: list[Replay | None] = []
    for run in runs:
        try:
            replays.append(graphs.capture(run))
        except Exception as problem:
            logger.debug("not chosen: %s", problem)
            replays.append(None)
    best = [float("inf")] * len(runs)
    for _ in range(TURNS):
        for index, replay in enumerate(replays):
            if replay is not None:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                replay()
                end.record()
                end.synchronize()
                best[index] = min(best[index], start.elapsed_time(end) / 1e3)
    return best


def overlap_agrees(
    model: CausalLM,
    dtype: torch.dtype,
    block_size: int,
    device: torch.device,
    graphs: Graphs,
    turn: Callable[[bool], None],
) -> bool:
    """Whether decode steps in a graph give the same bits with kernels that overlap and without.

    The tokens change from step to step, so what is read too early is of another step.
    """
    rows = min(MAX_ROWS, block_size, model.rotary.table.shape[1])
    ids, logits, run = decode_step(model, rows, dtype, block_size, device)
    found: list[list[torch.Tensor]] = []
    for layer in _products(model):
        layer.tile = TILES[0]  # that kernel too
    for on in (False, True):
        turn(on)
        replay = graphs.capture(run)
        found.append([])
        for step in range(TRIED_STEPS):
            ids.copy_((torch.arange(rows, device=device) + 1 + step) * 7919 % logits.shape[1])
            replay()
            found[-1].append(logits.view(torch.uint8).clone())
    return all(torch.equal(*pair) for pair in zip(*found, strict=True))


def decode_step(
    model: CausalLM, rows: int, dtype: torch.dtype, block_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, Callable[[], None]]:
    """A step of its own: the tokens that it reads, int64 [rows], the logits that it leaves, and what runs it.

    The requests share one block, in which the first has one token, the second two, and so on: each reads what the step
    has just written for the others.
    """
    kv_caches, num_groups = model.allocate_kv_cache(1, dtype, device), kv_layout(model.config).num_groups
    place = torch.arange(rows + 1, device=device)
    ids = torch.zeros(rows, dtype=torch.int64, device=device)
    logits = torch.zeros(rows, model.config.vocab_size, dtype=dtype, device=device)

    def run() -> None:
        metadata = AttentionMetadata(
            query_start_loc=place.int(),
            seq_lens=place[1:].int(),
            block_table=torch.zeros(rows, 1, dtype=torch.int32, device=device),
            slot_mapping=place[:rows],
            num_decodes=rows,
            query_lens_list=[1] * rows,
            seq_lens_list=[],
        )
        logits.copy_(model.compute_logits(model(ids, place[:rows], [metadata] * num_groups, kv_caches)))

    return ids, logits, run
