"""The embedded model's file, for tests of every room: fetched once into the default cache, as the server does it."""

from functools import cache
from pathlib import Path

from gpu.checkpoint.embedded import default_cache_dir, fetch_embedded_model


@cache
def embedded_gguf() -> Path:
    return fetch_embedded_model(default_cache_dir())
