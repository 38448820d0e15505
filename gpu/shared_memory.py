"""Memory that processes share: files of no disk, which are gone with the last descriptor and mapping."""

from __future__ import annotations

import os

from engine.errors import HeadraceError


def allocate(descriptor: int, num_bytes: int, offset: int = 0) -> None:
    """Make a file at least as long, and take the memory for it: who maps a file whose memory is found only when it is
    touched is killed (SIGBUS) where there is none. Raises HeadraceError."""
    try:
        os.posix_fallocate(descriptor, offset, num_bytes)
    except OSError as error:
        raise HeadraceError(
            f"The system refuses {num_bytes / 2**20:,.1f} MiB of memory that processes share ({error.strerror}). "
            "A smaller max_num_batched_tokens needs less, and so do a smaller tensor_ or pipeline_parallel_size."
        ) from error
