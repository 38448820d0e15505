"""What a driver tells its ranks, all of them the same, and what each rank tells it: msgpack, never pickled.

While it loads, a rank says how far it is, then how large a KV cache it could have; the driver answers with the smallest
of all. Then it says what it has become, and from there on carries out what it is told, in order.
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
    """The descriptors of a ring: its memory's, and its readers' wakers."""

    memory: int
    wakers: list[int]


class RankSetup(msgspec.Struct, kw_only=True):
    """What a rank of this machine is told at its start, on the connection that it inherits."""

    layout: Layout
    model: str  # this and the next three fields are arguments of `gpu.checkpoint.open_model`
    cache_dir: str | None
    load_format: str
    seed: int = 0
    options: dict[str, Any]  # of `gpu.runner.runner.WorkerOptions`
    ring: Group
    before: Group | None = None  # activations from the stage before
    after: Group | None = None  # activations to the stage behind
    segment: int | None = None  # memory of the tensor ranks of its stage
    store: int | None = None  # a file in which all ranks find each other
    log: dict[str, Any] = {}  # for whoever configures it

    @property
    def descriptors(self) -> list[int]:
        """What it inherits."""
        groups = [group for group in (self.ring, self.before, self.after) if group is not None]
        files = [each for each in (self.segment, self.store) if each is not None]
        return [each for group in groups for each in (group.memory, *group.wakers)] + files


# --- down


class CacheSize(msgspec.Struct, tag=True, array_like=True):
    """How large a KV cache is; up, how large it could be."""

    num_blocks: int
    max_model_len: int
    bytes_per_block: int  # up, the rank's; down, those of all ranks together


class Step(msgspec.Struct, tag=True, array_like=True):
    """Run this plan. If it has masks, they follow. Steps are counted from 1 on."""

    number: int
    plan: SchedulerOutput
    # Tokens that earlier steps sampled, for ranks that have not sampled them: by step, in the order of its plan; None
    # of a step that came to nothing.
    sampled: dict[int, list[list[int]] | None] = {}


class Masks(msgspec.Struct, tag=True, array_like=True):
    """The masks of a step, or why there are none."""

    step: int
    shape: tuple[int, int] = (0, 0)
    indices: bytes = b""
    bits: bytes = b""
    error: str = ""

    @classmethod
    def of(cls, step: int, handle: MasksHandle) -> Masks:
        """Waits for them."""
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
    """Do one of what `gpu.parallel.rank` has besides steps: "prepare", "start_profile", "stop_profile"."""

    name: str


Down = CacheSize | Step | Masks | Call

# --- up


class Progress(msgspec.Struct, tag=True, array_like=True):
    """How far loading is, as a `gpu.checkpoint.Progress` is told."""

    phase: str
    done: int
    total: int | None


class Loaded(msgspec.Struct, tag=True, array_like=True, kw_only=True):
    """What an executor has to know of its worker."""

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
    """What a step gave. Told by the first rank of the last stage."""

    step: int
    output: ModelRunnerOutput


class ExpertTokens(msgspec.Struct, tag=True, array_like=True):
    """How many tokens each expert of each of a stage's layers has had: of the whole layer, whose tokens every tensor
    rank routes alike. Told by the first of them, now and then."""

    tokens: list[list[int]]


class Failed(msgspec.Struct, tag=True, array_like=True):
    """A step has raised, or loading has (then it is step -1)."""

    step: int
    error: ErrorInWords


class Answer(msgspec.Struct, tag=True, array_like=True):
    """What a `Call` has returned, or raised."""

    value: Any = None
    error: ErrorInWords | None = None


Up = Progress | CacheSize | Loaded | Output | ExpertTokens | Failed | Answer

encode = msgspec.msgpack.Encoder(enc_hook=lambda handle: True).encode  # of masks that they will follow
decode_up: Callable[[bytes], Up] = msgspec.msgpack.Decoder(Up).decode


def down_decoder(masks: Callable[[], MasksHandle]) -> Callable[[bytes], Down]:
    """For a rank: `masks` makes the handle of masks that follow."""
    return msgspec.msgpack.Decoder(Down, dec_hook=lambda kind, value: masks()).decode
