"""Before any test module loads torch or Triton."""

import os

import gpu  # noqa: F401  (sets how OpenMP's threads wait, which is read when torch is loaded)

# Triton decides when it is imported whether its kernels are compiled or interpreted; here they are tested on a CPU.
os.environ["TRITON_INTERPRET"] = "1"
