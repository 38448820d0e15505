"""The draw of `gpu.sampling`, computed by the library: 32 rows of 49,152 logits in a few per cent of torch's time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.cpu.library import Threads

_DTYPES = (np.float32, np.int64, np.float64, np.float64, np.float64)  # of hr_draw's parameters


def draw(
    threads: Threads, logits: NDArray[np.float32], *parameters: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """With its first argument given, a `gpu.sampling.sampler.Draw`."""
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
