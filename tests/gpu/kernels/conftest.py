"""Every test of this folder runs twice: on the torch references, and on the kernels in Triton's interpreter."""

import warnings

import pytest

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
