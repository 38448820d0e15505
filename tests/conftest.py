"""Before any test module loads torch."""

import gpu  # noqa: F401  (sets how OpenMP's threads wait, which is read when torch is loaded)
