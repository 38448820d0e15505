"""Programmatic dependent launch, from Hopper on: a kernel is started while the one before it still runs, and waits
within for that to end. So it is in its place when its input is.

It is right if each kernel that is started so waits before it reads or writes what others write, in every program:
then the one before has ended, and whatever that one waited for. `tests/gpu/test_kernels_compile.py` looks for it in the
machine code. gpu.device.choices turns it on, where the card shows that it gives the same.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_is_on = False


def turn(on: bool) -> None:
    global _is_on
    _is_on = on


def launch_options() -> dict[str, bool]:
    """Of the launch of a kernel that begins with `wait_for_predecessor(PDL)`."""
    return {"PDL": True, "launch_pdl": True} if _is_on else {"PDL": False}


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # the next may take its place as soon as all programs of this one have theirs
