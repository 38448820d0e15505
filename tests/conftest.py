"""Before any test module loads torch or Triton."""

import ctypes
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

import gpu  # noqa: F401  (sets how OpenMP's threads wait, which is read when torch is loaded)

pytest_plugins = ["tests.support.servers"]  # the servers that tests of several folders share

# Triton decides when it is imported whether its kernels are compiled or interpreted; here they are tested on a CPU.
os.environ["TRITON_INTERPRET"] = "1"

# A shell starts what runs in the background with SIGINT ignored, and so would all processes of the tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every run draws the same examples, however slow the machine is: what fails is what was changed. `make storm` draws new
# ones.
_patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeated", _patient, derandomize=True, database=None)
settings.register_profile("explored", _patient, print_blob=True)
settings.load_profile("repeated")


@pytest.fixture(scope="module", autouse=True)
def _give_memory_back() -> Iterator[None]:
    """The C library keeps what a file's models lay in, and a worker would grow by gigabytes until the end."""
    yield
    ctypes.CDLL(None).malloc_trim(0)
