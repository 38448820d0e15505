"""Which of the two, kernel or reference. Imported by every public kernel function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_interpreting = False


def on_triton(tensor: torch.Tensor) -> bool:
    """Whether work on this tensor goes to Triton; if not, to the torch reference."""
    return tensor.is_cuda or _interpreting


@contextmanager
def interpreted() -> Iterator[None]:
    """Within it, kernels run on CPU tensors too, in Triton's interpreter: slow, and for tests.

    Triton decides when it is imported, so the process must have been started with TRITON_INTERPRET=1. The interpreter
    of Triton 3.6 and 3.9 multiplies bfloat16 matrices wrongly; float16 and float32 are right.
    """
    global _interpreting
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before
