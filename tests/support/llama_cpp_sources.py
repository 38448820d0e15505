"""The source archive of the package llama-cpp-python, for tests alone: it carries real vocabularies and texts with ids.

The archive is fetched once, into the cache that the embedded model lies in, and never built.
"""

import fcntl
import subprocess
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path

from gpu.checkpoint.embedded import default_cache_dir

_REQUIREMENT = "llama-cpp-python==0.3.36"
_ARCHIVE = "llama_cpp_python-0.3.36.tar.gz"
_ROOT = "llama_cpp_python-0.3.36/vendor/llama.cpp/"


@cache
def archive() -> Path:
    folder = default_cache_dir()
    target = folder / _ARCHIVE
    folder.mkdir(parents=True, exist_ok=True)
    with open(f"{target}.lock", "w") as lock, tempfile.TemporaryDirectory(dir=folder) as fresh:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file():
            options = ["--no-deps", "--no-binary", ":all:", "--dest", fresh]
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", *options, _REQUIREMENT], check=True)
            (Path(fresh) / _ARCHIVE).replace(target)
    return target


def unpack(inner: str, folder: Path) -> list[Path]:
    """Unpack the files of llama.cpp that have names which begin with `inner`, such as "models/ggml-vocab-"."""
    with tarfile.open(archive()) as tar:
        members = [each for each in tar if each.isfile() and each.name.startswith(_ROOT + inner)]
        for member in members:
            member.name = Path(member.name).name
            tar.extract(member, folder, filter="data")
    return [folder / member.name for member in members]
