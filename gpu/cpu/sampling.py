"""The draw of `gpu.sampling`, computed by the library: 32 rows of 49,152 logits in a few per cent of the time."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu.cpu.library import Library, Threads, load_library

_DTYPES = (np.float32, np.int64, np.float64, np.float64, np.float64)  # of hr_draw's parameters


def can_draw(logits: torch.Tensor) -> bool:
    """Whether `draw` takes these logits: float32 rows on the CPU, where the library was built."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and load_library() is not None


def draw(logits: torch.Tensor, *parameters: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """One token for each row of `logits`, float32 [S, vocab], which are overwritten.

    The parameters are those of hr_draw, [S] each: the columns of temperature and filters, then the uniform numbers.

    int64 [S], and bool [S], False where a row is no distribution and its token means nothing. The filters are those of
    `gpu.sampling.filters`: min-p, then top-k, then top-p on what is left; what ties with the last one kept is kept.
    """
    library = load_library()
    assert library is not None
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocab_size = logits.shape
    token_ids = np.empty(rows, dtype=np.int64)
    finite = np.empty(rows, dtype=np.bool_)
    columns = [np.ascontiguousarray(part, dtype=dtype) for part, dtype in zip(parameters, _DTYPES, strict=True)]
    library.functions.hr_draw(
        _threads(library, torch.get_num_threads()).handle,
        logits.data_ptr(),
        rows,
        vocab_size,
        logits.stride(0),
        *(column.ctypes.data for column in columns),
        token_ids.ctypes.data,
        finite.ctypes.data,
    )
    return token_ids, finite


@cache
def _threads(library: Library, num_threads: int) -> Threads:
    return Threads(library, num_threads)
