"""The loaded C++ library: its functions, structs and draw.

Its interface is plain pointers and sizes, without Python or torch, so that it compiles quickly with any C++ compiler
and a call releases the interpreter's lock. The structs equal those of csrc/matrix.h, csrc/attention.h, csrc/delta.h,
csrc/experts.h and csrc/model.h, field by field: `PartStruct` is `headrace::Part`, and so on; `LayerStruct`,
`ModelStruct` and `ForwardStruct` are `hr_layer`, `hr_model` and `hr_step`.
"""

from __future__ import annotations

import ctypes
import logging
import socket
import sys
from collections.abc import Iterator
from ctypes import POINTER, c_bool, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import RankLost
from gpu.cpu.builds import BUILDS
from gpu.host import processor_flags

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent  # has the builds; tests put their own here
STOP_INTERVAL = 0.02  # seconds between two checks of whether a step was abandoned

StopFunction = ctypes.CFUNCTYPE(c_int32)


class PartStruct(ctypes.Structure):
    _fields_ = (("form", c_int32), ("tiles", c_int32), ("data", c_void_p))


class MatrixStruct(ctypes.Structure):
    _fields_ = (("rows", c_int32), ("cols", c_int32), ("parts", PartStruct * 3))


class HeadsStruct(ctypes.Structure):
    _fields_ = (
        ("query", c_int32),
        ("kv", c_int32),
        ("dim", c_int32),
        ("block_size", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
        ("is_int8", c_int32),
        ("ahead", c_int32),
    )


class StepStruct(ctypes.Structure):
    _fields_ = (
        ("num_tokens", c_int32),
        ("num_requests", c_int32),
        ("positions", c_void_p),
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("rows", c_void_p),
        ("save_begin", c_void_p),
        ("saves", c_void_p),
    )


class ExpertStruct(ctypes.Structure):
    _fields_ = (
        ("gate_up", MatrixStruct),
        ("down", MatrixStruct),
        ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p),
    )


class ExpertsStruct(ctypes.Structure):
    _fields_ = (
        ("router", c_void_p),
        ("router_bias", c_void_p),
        ("experts", POINTER(ExpertStruct)),
        ("first", c_int32),
        ("here", c_int32),
        ("count", c_int32),
        ("top_k", c_int32),
        ("normalized", c_int32),
        ("alpha", c_float),
        ("limit", c_float),
        ("tokens", c_void_p),
        ("shared_gate", c_void_p),
        ("shared", POINTER(ExpertStruct)),
    )


class DeltaStruct(ctypes.Structure):
    _fields_ = (
        ("key_heads", c_int32),
        ("value_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("tokens", c_int32),
        ("by_key_head", c_int32),
        ("tiled", c_int32),
        ("conv", c_void_p),
        ("dt_bias", c_void_p),
        ("a_log", c_void_p),
        ("norm", c_void_p),
        ("states", c_void_p),
        ("stride", c_int64),
    )


class LayerStruct(ctypes.Structure):
    _fields_ = (
        ("qkv", MatrixStruct),
        ("out", MatrixStruct),
        ("gate_up", MatrixStruct),
        ("down", MatrixStruct),
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv_bias", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("attention_post_norm", c_void_p),
        ("mlp_post_norm", c_void_p),
        ("out_bias", c_void_p),
        ("experts", POINTER(ExpertsStruct)),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("query_scales", c_void_p),
        ("kv_cache", c_void_p),
        ("delta", POINTER(DeltaStruct)),
        ("norm_together", c_int32),
        ("group", c_int32),
        ("rotary", c_int32),
        ("is_gated", c_int32),
        ("attended_begin", c_int32),
        ("heads", HeadsStruct),
        ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("attention_sum_norm", c_void_p),
        ("mlp_sum_norm", c_void_p),
    )


class ModelStruct(ctypes.Structure):
    _fields_ = (
        ("embedding", MatrixStruct),
        ("head", MatrixStruct),
        ("final_norm", c_void_p),
        ("layers", POINTER(LayerStruct)),
        ("num_layers", c_int32),
        ("hidden", c_int32),
        ("epsilon", c_float),
        ("embedding_scale", c_float),
        ("activation", c_int32),
        ("post_norms", c_int32),
        ("hidden_begin", c_int32),
        ("inner_begin", c_int32),
        ("vocabulary_begin", c_int32),
        ("added", c_void_p),
        ("embedding_norm", c_void_p),
        ("centred", c_int32),
    )


class ForwardStruct(ctypes.Structure):
    _fields_ = (
        ("step", StepStruct),
        ("input_ids", c_void_p),
        ("input", c_void_p),
        ("num_prompt_tokens", c_void_p),
        ("hidden", c_void_p),
        ("stop", StopFunction),
        ("news", c_void_p),
        ("stop_interval", c_double),
        ("added", c_void_p),
    )


_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "hr_is_permitted": (c_bool, ()),
    "hr_has_tiles": (c_bool, ()),
    "hr_create": (c_void_p, (c_int32,)),
    "hr_destroy": (None, (c_void_p,)),
    "hr_forward": (c_int32, (c_void_p, POINTER(ModelStruct), POINTER(ForwardStruct))),
    "hr_multiply": (
        c_int32,
        (c_void_p, POINTER(MatrixStruct), c_void_p, c_int32, c_int32, c_void_p, c_void_p, c_int64),
    ),
    "hr_logits": (c_int32, (c_void_p, POINTER(MatrixStruct), c_void_p, c_int32, c_int32, c_void_p, c_int64)),
    "hr_largest_product": (
        c_int32,
        (c_void_p, POINTER(MatrixStruct), c_void_p, c_int32, c_int64, c_void_p, c_void_p),
    ),
    "hr_shared_bytes": (c_int64, (POINTER(ModelStruct), *[c_int32] * 4)),
    "hr_join": (c_int32, (c_void_p, c_void_p, POINTER(ModelStruct), *[c_int32] * 3, c_void_p)),
    "hr_segment_bytes": (c_int64, (c_int32,)),
    "hr_ranks_create": (c_void_p, (c_void_p, c_int32, c_int32, c_double)),
    "hr_ranks_destroy": (None, (c_void_p,)),
    "hr_barrier": (c_int32, (c_void_p,)),
    "hr_all_reduce": (c_int32, (c_void_p, c_void_p, c_int64)),
    "hr_all_gather": (c_int32, (c_void_p, c_void_p, c_void_p, c_void_p)),
    "hr_lose": (None, (c_void_p, c_int32)),
    "hr_matrix_row": (None, (POINTER(MatrixStruct), c_int32, c_void_p)),
    "hr_tile_bytes": (c_int64, (POINTER(MatrixStruct), c_int32)),
    "hr_pack_blocks": (c_int32, (POINTER(MatrixStruct), c_int32, c_void_p, c_int64, *[c_int32] * 3)),
    "hr_pack_floats": (c_int32, (POINTER(MatrixStruct), c_void_p, *[c_int32] * 3)),
    "hr_draw": (c_int32, (c_void_p, c_void_p, c_int32, c_int64, c_int64, *[c_void_p] * 7)),
}
# Values of `headrace::Outcome`. The last one plus a number names the lost rank.
_OUT_OF_MEMORY, _FAILED, _OTHER_PROCESS, _RANK_LOST = 2, 3, 4, 16
_NO_SUCH_FORM = -1  # what packing functions return


class Library:
    """One loaded build. `name` is a key of BUILDS; `functions` has those of csrc by name."""

    @property
    def instructions(self) -> str:
        """The processor instructions that it was built for, for the log."""
        return BUILDS[self.name].instructions

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.first_rank = 0  # the number in the world of the first rank that shares memory with this process
        self.functions = ctypes.CDLL(str(path))
        for function, (result, arguments) in _SIGNATURES.items():
            entry = getattr(self.functions, function)
            entry.restype, entry.argtypes = result, arguments
            if result is c_int32:
                entry.errcheck = self._check_outcome

    def _check_outcome(self, outcome: int, function: ctypes._NamedFuncPointer, _: object) -> int:
        if outcome == _NO_SUCH_FORM:
            raise ValueError(f"{function.__name__} does not know this form or type")
        if outcome == _OUT_OF_MEMORY:
            raise MemoryError(f"{function.__name__} could not allocate its working memory")
        if outcome == _FAILED:
            raise RuntimeError(f"{function.__name__} failed")
        if outcome == _OTHER_PROCESS:
            raise RuntimeError(
                f"{function.__name__} was called with threads of another process: "
                "a forked process needs threads of its own"
            )
        if outcome >= _RANK_LOST:
            rank = self.first_rank + outcome - _RANK_LOST
            raise RankLost(rank, socket.gethostname(), "did not join a call that the other ranks wait in")
        return outcome


class Threads:
    """The threads of one engine, and its working memory. They sleep between steps.

    Calls from several threads take turns. A caller keeps this object, and all memory that the call reads and writes,
    alive. A forked process cannot use these threads, which stay with its parent, but may create its own.
    """

    def __init__(self, library: Library, num_threads: int) -> None:
        self.library = library
        self.handle = library.functions.hr_create(num_threads)
        if self.handle is None:
            raise MemoryError("could not allocate memory for an engine's threads")

    def __del__(self) -> None:
        # When the interpreter ends, a thread in a call never returns to it and keeps using this memory.
        if (handle := getattr(self, "handle", None)) and not sys.is_finalizing():
            self.library.functions.hr_destroy(handle)


def built() -> dict[str, Path]:
    """Return the paths of the installed builds, best first."""
    paths = {name: FOLDER / f"{name}{EXTENSION_SUFFIXES[0]}" for name in BUILDS}
    return {name: path for name, path in paths.items() if path.exists()}


def usable() -> Iterator[Library]:
    """Load the builds that the processor and the kernel allow, best first.

    A processor's flags do not say that its tiles (AMX) may be used: the kernel must permit it, and refuses in some
    sandboxes and virtual machines.
    """
    flags = processor_flags()
    for name, path in built().items():
        if BUILDS[name].flags <= flags:
            library = Library(name, path)
            if library.functions.hr_is_permitted():
                yield library


@cache
def load_library() -> Library | None:
    """Return the best usable build, or None.

    Logs a warning if the build is older than its sources, which happens in a clone after `git pull`: a call with
    other parameters would crash the process.
    """
    library = next(usable(), None)
    if library is not None:
        built_at = library.path.stat().st_mtime
        if any(source.stat().st_mtime > built_at for source in (FOLDER / "csrc").glob("*")):
            logger.warning("%s is older than its sources in %s: run make", library.path.name, FOLDER / "csrc")
    return library


# ------------------------------------------------------------------------------------------------------------- sampling


_DTYPES = (np.float32, np.int64, np.float64, np.float64, np.float64)  # the parameters of hr_draw


def draw(
    threads: Threads, logits: NDArray[np.float32], *parameters: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Draw tokens like `gpu.sampling.draw`, many times as fast. With `threads` bound it is a
    `gpu.sampling.sampler.Draw`."""
    if logits.strides[1] != logits.itemsize:
        logits = np.ascontiguousarray(logits)
    rows, vocab_size = logits.shape
    token_ids = np.empty(rows, dtype=np.int64)
    finite = np.empty(rows, dtype=np.bool_)
    columns = [np.ascontiguousarray(part, dtype=dtype) for part, dtype in zip(parameters, _DTYPES, strict=True)]
    threads.library.functions.hr_draw(
        threads.handle,
        logits.ctypes.data,
        rows,
        vocab_size,
        logits.strides[0] // logits.itemsize,
        *(column.ctypes.data for column in columns),
        token_ids.ctypes.data,
        finite.ctypes.data,
    )
    return token_ids, finite
