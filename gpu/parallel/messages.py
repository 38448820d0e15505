"""The messages between a driver and its ranks, in msgpack, never pickled. All ranks get the same messages.

A loading rank sends its progress, then the largest KV cache that it could have; the driver answers with the smallest of
all. The rank sends `Loaded`, and from then on executes the driver's messages in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from engine.errors import ErrorInWords
from engine.messages import ModelFacts
from engine.plan import MasksHandle, ModelRunnerOutput, SchedulerOutput, TokenMasks
from gpu.sharding import Layout


class Group(msgspec.Struct, array_like=True):
    """The descriptors of a ring: its memory, and the eventfds that wake its readers."""

    memory: int
    wakers: list[int]


class RankSetup(msgspec.Struct, kw_only=True):
    """The first message to a rank of this machine, on the connection that it inherits."""

    layout: Layout
    model: str  # this and the next three fields are arguments of `gpu.checkpoint.open_model`
    cache_dir: str | None
    load_format: str
    seed: int = 0
    options: dict[str, Any]  # fields of `gpu.runner.runner.WorkerOptions`
    ring: Group
    before: Group | None = None  # activations from the stage before
    after: Group | None = None  # activations to the next stage
    segment: int | None = None  # shared memory of the stage's tensor ranks
    store: int | None = None  # the file of torch's store, by which all ranks find each other
    log: dict[str, Any] = {}  # the configuration of the rank's log

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that the rank's process inherits."""
        groups = [group for group in (self.ring, self.before, self.after) if group is not None]
        files = [each for each in (self.segment, self.store) if each is not None]
        return [each for group in groups for each in (group.memory, *group.wakers)] + files


# --- down


class CacheSize(msgspec.Struct, tag=True, array_like=True):
    """The size of the KV cache; from a rank, the largest that it could have."""

    num_blocks: int
    max_model_len: int
    bytes_per_block: int  # on one rank; from the driver, on all ranks together
    num_checkpoints: int = 0
    state_bytes: int = 0  # like `bytes_per_block`


class Step(msgspec.Struct, tag=True, array_like=True):
    """The plan of one step, to run. Its token masks, if any, come later in `Masks`. Steps are numbered from 1."""

    number: int
    plan: SchedulerOutput
    # Tokens that earlier steps sampled, for ranks of other stages: by step, in the order of its plan; None for a step
    # that failed.
    sampled: dict[int, list[list[int]] | None] = {}


class Masks(msgspec.Struct, tag=True, array_like=True):
    """The masks of a step, or the error of computing them."""

    step: int
    shape: tuple[int, int] = (0, 0)
    indices: bytes = b""
    bits: bytes = b""
    error: str = ""

    @classmethod
    def of(cls, step: int, handle: MasksHandle) -> Masks:
        """Wait for the masks of `handle`, and return them as a message."""
        try:
            masks = handle.result()
        except Exception as error:
            return cls(step, error=type(error).__name__)
        rows, words = masks.bits.shape
        return cls(step, (rows, words), masks.indices.tobytes(), masks.bits.tobytes())

    def masks(self) -> TokenMasks:
        if self.error:
            raise RuntimeError(f"the masks of step {self.step} could not be computed ({self.error})")
        bits = np.frombuffer(self.bits, np.uint32).reshape(self.shape)
        return TokenMasks(indices=np.frombuffer(self.indices, np.int64), bits=bits)


class Call(msgspec.Struct, tag=True, array_like=True):
    """Call a function of the rank by its name: "prepare", "start_profile" or "stop_profile"."""

    name: str


Down = CacheSize | Step | Masks | Call

# --- up


class LoadProgress(msgspec.Struct, tag=True, array_like=True):
    """The arguments of a call of `gpu.checkpoint.Progress` while a rank loads."""

    phase: str
    done: int
    total: int | None


class Loaded(msgspec.Struct, tag=True, array_like=True, kw_only=True):
    """The facts of a loaded worker that the executor passes on to the engine."""

    num_blocks: int
    block_size: int
    vocab_size: int
    max_model_len: int
    pipeline_depth: int
    facts: ModelFacts
    computes: str  # device, forms and threads, in words
    device_name: str
    kv_cache: str  # in words


class Output(msgspec.Struct, tag=True, array_like=True):
    """The output of a step, from the first rank of the last stage."""

    step: int
    output: ModelRunnerOutput


class ExpertTokens(msgspec.Struct, tag=True, array_like=True):
    """The token counts of a stage by layer and expert, sent from time to time. They come from the stage's first tensor
    rank, because all its tensor ranks route all tokens alike."""

    tokens: list[list[int]]


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The error of a step, or of loading (step -1)."""

    step: int
    error: ErrorInWords


class Answer(msgspec.Struct, tag=True, array_like=True):
    """The result or the error of a `Call`."""

    value: Any = None
    error: ErrorInWords | None = None


Up = LoadProgress | CacheSize | Loaded | Output | ExpertTokens | Failed | Answer

encode = msgspec.msgpack.Encoder(enc_hook=lambda handle: True).encode  # masks follow; their handle becomes True
decode_up: Callable[[bytes], Up] = msgspec.msgpack.Decoder(Up).decode


def down_decoder(masks: Callable[[], MasksHandle]) -> Callable[[bytes], Down]:
    """Return a rank's decoder. `masks` makes the handle of masks that follow a step."""
    return msgspec.msgpack.Decoder(Down, dec_hook=lambda kind, value: masks()).decode
