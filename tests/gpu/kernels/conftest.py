"""Every test of this folder runs twice: on the torch references, and on the kernels in Triton's interpreter."""

import warnings

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from gpu.kernels.dispatch import interpreted


@pytest.fixture(params=["reference", "kernel"], autouse=True)
def form(request):
    """Which of the two the test runs on."""
    if request.param == "reference":
        yield request.param
        return
    with interpreted(), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # of numpy, which computes for the interpreter
        yield request.param


@pytest.fixture
def right_e4m3(monkeypatch):
    """Round to E4M3 as devices do: Triton's interpreter rounds the numbers below a power of two to half of it."""
    convert = interpreter._convert_float

    def rounded(values, given, wanted, mode):
        if wanted != tl.float8e4nv:
            return convert(values, given, wanted, mode)
        return torch.from_numpy(np.ascontiguousarray(values)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
