"""The choice between a kernel and its torch reference, and Triton where there is a card. Imported by every kernel."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch

__all__ = ["interpreted", "libdevice", "on_triton", "tl", "triton"]

# A machine without a card need not have Triton, and does not spend a second on its import. A process that wants to
# compile or interpret kernels there imports Triton first, or is started with TRITON_INTERPRET=1.
if torch.cuda.is_available() or "triton" in sys.modules or os.environ.get("TRITON_INTERPRET") == "1":
    # Triton 3.10 no longer fuses multiplications and additions by default, which would change the last bits of results.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
else:

    def _left_alone(kernel: Callable | None = None, **_options: object) -> Callable:
        """Replace `triton.jit` without Triton: the kernels of the module are never launched."""
        return kernel or _left_alone

    triton, tl, libdevice = SimpleNamespace(jit=_left_alone), None, None

_interpreting = False


def on_triton(tensor: torch.Tensor) -> bool:
    """Return True if work on this tensor goes to a Triton kernel, False if it goes to the torch reference."""
    return tensor.is_cuda or _interpreting


@contextmanager
def interpreted() -> Iterator[None]:
    """Run kernels on CPU tensors too, in Triton's interpreter: slow, and for tests.

    Triton decides when it is imported, so the process must have been started with TRITON_INTERPRET=1. The interpreter
    of Triton 3.6 and 3.9 multiplies bfloat16 matrices wrongly; float16 and float32 are right.
    """
    global _interpreting
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before
