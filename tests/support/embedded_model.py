"""The embedded model's file, for tests of every room: fetched once into the default cache, as the server does it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

import gguf
import numpy as np

from gpu.checkpoint.embedded import default_cache_dir, fetch_embedded_model


@cache
def embedded_gguf() -> Path:
    return fetch_embedded_model(default_cache_dir())


@contextmanager
def read_gguf_once() -> Iterator[None]:
    """Within this, what transformers reads of a GGUF file costs seconds.

    Else it is most of a minute: transformers has the head read anew for each question, as a view of mapped memory for
    every token, and the table of names made anew for each module.
    """
    with (
        patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)),
        patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
        patch.object(np, "memmap", lambda path, mode: np.fromfile(path, np.uint8)),
    ):
        yield
