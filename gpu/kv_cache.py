"""The layout of keys and values, and the number of blocks that fit."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from engine.errors import ConfigError
from engine.plan import most_blocks
from gpu.checkpoint import ModelConfig, ModelError
from gpu.checkpoint.architecture import AttentionSpec, DecoderSpec, Heads
from gpu.checkpoint.families.table import spec_of
from gpu.checkpoint.tensors import shapes_of

GIB = 2**30

# On a CPU the cache shares memory with everything else that runs there, and decoding is too slow to fill a large one.
CPU_MEMORY_SHARE = 0.25
CPU_MEMORY_LIMIT = 4 * GIB


@dataclass(frozen=True, kw_only=True)
class KVCacheSize:
    """A cache of `num_blocks` blocks, and the longest context to serve with it."""

    num_blocks: int
    block_size: int  # tokens
    bytes_per_block: int  # over all layers of a KV group
    max_model_len: int
    num_tokens: int  # tokens in contexts of `max_model_len`
    layers: str = ""  # a text about a block's layers, if it does not have all
    state_bytes: int = 0  # bytes of a request's state, if the model has states
    num_states: int = 0  # states of running requests
    num_checkpoints: int = 0  # states kept as checkpoints

    def __str__(self) -> str:
        if not self.bytes_per_block:
            return f"No KV cache: prompts of up to {self.max_model_len:,} tokens are computed whole"
        states = ""
        if self.state_bytes:
            states = (
                f"; states of {size_text(self.state_bytes)} each: {self.num_states:,} of running requests, and "
                f"{self.num_checkpoints:,} checkpoints"
            )
        return (
            f"KV cache: {size_text(self.num_blocks * self.bytes_per_block)}, {self.num_blocks:,} blocks of "
            f"{self.block_size} tokens{self.layers}: room for {self.num_tokens:,} tokens, "
            f"{self.num_tokens / self.max_model_len:.1f} x the {self.max_model_len:,}-token context{states}"
        )


def check_max_model_len(config: ModelConfig, max_model_len: int | None) -> int:
    """Return the context length to build the model for. Raises ConfigError if the model has fewer positions."""
    limit = config.max_position_embeddings
    if max_model_len is None:
        return limit
    if not 1 <= max_model_len <= limit:
        raise ConfigError(
            "max_model_len",
            max_model_len,
            allowed=f"this model has positions for 1 to {limit:,} tokens",
            hint=f"max_model_len={limit} works",
        )
    return max_model_len


def check_weights_fit(spec: DecoderSpec, free: int, fewest_bits: int = 4) -> None:
    """Raise ModelError for a model, or a rank's part of one, that needs more than `free` bytes with `fewest_bits` for
    each weight: running out of memory could end the process."""
    num_weights = sum(map(math.prod, shapes_of(spec).values()))
    fewest_bytes = num_weights * fewest_bits // 8
    if fewest_bytes > free:
        raise ModelError(
            f"The model has {num_weights:,} weights, which take at least {size_text(fewest_bytes)}; "
            f"{size_text(free)} are free on the device. Serve a smaller model."
        )


def check_memory(num_bytes: int, free: int, setting: str = "kv_cache_memory", where: str = "on the device") -> None:
    """Raise ConfigError for a cache larger than the `free` bytes: running out of memory could end the process."""
    if num_bytes > free:
        raise ConfigError(
            setting,
            size_text(num_bytes),
            allowed=f"{size_text(free)} are free {where}",
            hint=f"{setting}={free // 2} works, or leave it out",
        )


def kv_cache_size(
    config: ModelConfig,
    *,
    element_size: float,
    block_size: int,
    tokens_held: int | None = None,
    max_num_seqs: int,
    max_model_len: int | None,
    max_num_batched_tokens: int = 512,
    budget: int,
    kv_cache_memory: int | None,
    checkpoint_share: float = 0.2,
    spec: DecoderSpec | None = None,
) -> KVCacheSize:
    """Choose the size in blocks.

    If `kv_cache_memory` is given, the cache takes all of it; else it takes `budget`, or less if `max_num_seqs` requests
    of the longest context need less (all in bytes). `tokens_held` are the tokens that a block takes memory for, if they
    are more than `block_size`. States of running requests, and checkpoints of states (`checkpoint_share` of the
    memory), are subtracted first; blocks get the rest. A rank's `spec` has its heads and layers. A `max_model_len` of
    None is the model's own, lowered to the tokens that the cache holds. Raises ConfigError if not even one block fits,
    or no request of the given `max_model_len`.
    """
    longest = check_max_model_len(config, max_model_len)
    spec = spec or spec_of(config)
    layout = kv_layout(config, spec)
    heads = widest_heads(spec)
    bytes_per_block = layout.num_slots * round(heads.cached * element_size) * (tokens_held or block_size)

    def blocks(num_tokens: int) -> int:  # blocks of one request, with two steps in flight
        return most_blocks(layout.windows, block_size, num_tokens, 2 * max_num_batched_tokens)

    memory = max(0, budget) if kv_cache_memory is None else kv_cache_memory
    num_checkpoints = int(memory * checkpoint_share) // spec.state_bytes if spec.state_bytes else 0
    states = (max_num_seqs + num_checkpoints) * spec.state_bytes
    if states and states + bytes_per_block > memory:
        raise ConfigError(
            "max_num_seqs",
            max_num_seqs,
            allowed=f"the states of so many requests take {size_text(max_num_seqs * spec.state_bytes)}, and their "
            f"checkpoints {checkpoint_share:.0%}, of {size_text(memory)} for the KV cache",
            hint=f"kv_cache_memory={2 * (states + blocks(longest) * bytes_per_block)} works, or a smaller max_num_seqs",
        )
    num_blocks = (memory - states) // bytes_per_block
    if kv_cache_memory is None:
        num_blocks = min(num_blocks, max_num_seqs * blocks(longest))
    needed = blocks(longest) * bytes_per_block + states

    held = bisect.bisect_right(range(1, longest + 1), num_blocks, key=blocks)  # tokens of one request
    if held == 0:
        raise ConfigError(
            "kv_cache_memory",
            size_text(memory),
            allowed=f"{block_size} tokens take {size_text(blocks(1) * bytes_per_block)}",
            hint=f"kv_cache_memory={needed} holds one request of {longest:,} tokens",
        )
    if max_model_len is not None and held < longest:
        raise ConfigError(
            "max_model_len",
            max_model_len,
            allowed=f"the KV cache of {size_text(memory)} holds {held:,} tokens",
            hint=f"max_model_len={held} works, or kv_cache_memory={needed}",
        )
    return KVCacheSize(
        num_blocks=num_blocks,
        block_size=block_size,
        bytes_per_block=bytes_per_block,
        max_model_len=held,
        num_tokens=num_blocks * -(-held // block_size) // blocks(held) * block_size,
        layers="" if len(layout.windows) == 1 else f" in {layout.num_slots} of {config.num_hidden_layers} layers each",
        state_bytes=spec.state_bytes,
        num_states=max_num_seqs,
        num_checkpoints=min(num_checkpoints, num_blocks),  # each is at the end of a block
    )


def size_text(num_bytes: int) -> str:
    for unit, factor in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} bytes"


# ------------------------------------------------------------------------------------------------------------ kv layout
# The KV group of each layer, and the layer's slot in the group's blocks. `engine.plan` explains groups. Torch-free.


STATE_GROUP = -1  # index of a step's last group


@dataclass(frozen=True)
class KVLayout:
    """The cache memory of each layer: layer l uses slot `slots[l]` of the blocks in the block table of group
    `groups[l]`. Layers with states have `STATE_GROUP`, and slots of their own after those of blocks. A slot has room
    for the layer with the widest keys; several narrow layers of a group share one, and layer l has part `parts[l]`. A
    layer that reads the keys and values of another has the place of that one."""

    windows: tuple[int | None, ...]  # each group's window
    groups: tuple[int, ...]  # each layer's group
    slots: tuple[int, ...]  # each layer's slot
    parts: tuple[int, ...]  # each layer's part of its slot

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def num_slots(self) -> int:
        """The number of layers that a block holds."""
        return 1 + max(slot for slot, group in zip(self.slots, self.groups, strict=True) if group != STATE_GROUP)


def kv_layout(config: ModelConfig, spec: DecoderSpec | None = None) -> KVLayout:
    """Group the layers of equal attention window. A group has as many slots as the rarest window needs; the last group
    of a window may be smaller.

    The groups are the same for all ranks of a model. With a rank's `spec`, layers and slots are those of the rank.
    """
    all_layers = range(config.num_hidden_layers)
    sources = [config.source(layer) for layer in all_layers]
    with_keys = [layer for layer in all_layers if config.has_keys(layer) and sources[layer] == layer]
    windows = [config.window(layer) for layer in with_keys]
    kinds = sorted(set(windows), key=lambda window: window or 0)  # full attention first
    widths = {config.window(layer): math.prod(config.kv_heads(layer)) for layer in with_keys}
    per_slot = {kind: max(widths.values()) // width for kind, width in widths.items()}
    num_slots = min(-(-windows.count(kind) // per_slot[kind]) for kind in kinds)
    places: dict[int, tuple[int, int, int]] = {}
    of_groups: list[int | None] = []
    for kind in kinds:
        layers = [layer for layer, window in zip(with_keys, windows, strict=True) if window == kind]
        for first in range(0, len(layers), num_slots * per_slot[kind]):
            held = enumerate(layers[first : first + num_slots * per_slot[kind]])
            places |= {layer: (len(of_groups), *divmod(index, per_slot[kind])) for index, layer in held}
            of_groups.append(kind)
    with_states = (layer for layer in all_layers if not config.has_keys(layer))
    places |= {layer: (STATE_GROUP, num_slots + index, 0) for index, layer in enumerate(with_states)}
    groups, slots, parts = zip(*(places[source] for source in sources), strict=True)
    if spec is not None:
        own = slice(spec.first_layer, spec.first_layer + len(spec.layers))
        kept = sorted(set(slots[own]))
        groups, slots, parts = groups[own], tuple(kept.index(slot) for slot in slots[own]), parts[own]
    return KVLayout(tuple(of_groups), groups, slots, parts)


def widest_heads(spec: DecoderSpec) -> Heads:
    """Return the heads of the layer with the most numbers in a token's keys."""
    heads = (layer.attention.heads for layer in spec.layers if isinstance(layer.attention, AttentionSpec))
    return max(heads, key=lambda each: each.cached)
