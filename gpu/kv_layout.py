"""Where each layer of a model has its keys and values: in which KV group, and at which place in the group's blocks.

`engine.scheduler.kv_groups` says what groups are for. Torch-free; models, worker and the size of the cache ask here.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu.checkpoint import ModelConfig
from gpu.checkpoint.architecture import DecoderSpec


@dataclass(frozen=True)
class KVLayout:
    """Layer l has the memory of slot `slots[l]`, and the block table of group `groups[l]` says where in it."""

    windows: tuple[int | None, ...]  # of each group
    groups: tuple[int, ...]  # of each layer
    slots: tuple[int, ...]  # of each layer

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def num_slots(self) -> int:
        """Layers of a group, for each of which a block has room."""
        return max(self.slots) + 1


def kv_layout(config: ModelConfig, spec: DecoderSpec | None = None) -> KVLayout:
    """Groups as large as the kind of layer that has the fewest; the last group of another kind may not be full.

    The groups are the same for all ranks of a model. With `spec`, what a rank has of it, layers and slots are its own.
    """
    windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
    kinds = sorted(set(windows), key=lambda window: window or 0)  # full ones first
    num_slots = min(map(windows.count, kinds))
    places: dict[int, tuple[int, int]] = {}
    of_groups: list[int | None] = []
    for kind in kinds:
        layers = [layer for layer, window in enumerate(windows) if window == kind]
        for first in range(0, len(layers), num_slots):
            places |= {layer: (len(of_groups), slot) for slot, layer in enumerate(layers[first : first + num_slots])}
            of_groups.append(kind)
    groups, slots = zip(*(places[layer] for layer in range(len(windows))), strict=True)
    if spec is not None:
        own = slice(spec.first_layer, spec.first_layer + len(spec.layers))
        kept = sorted(set(slots[own]))
        groups, slots = groups[own], tuple(kept.index(slot) for slot in slots[own])
    return KVLayout(tuple(of_groups), groups, slots)
