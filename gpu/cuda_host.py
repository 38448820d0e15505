"""Checks of the driver, the C compiler and the folder for compiled kernels that CUDA needs.

They run before a model is loaded. Otherwise each of the three fails minutes later, inside torch or Triton, with a
message that does not say what to install. This module imports neither torch nor Triton.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from engine.errors import ConfigError

logger = logging.getLogger(__name__)

OLDEST_DRIVERS = {"12": 525, "13": 580}  # the oldest driver by the major version of the CUDA libraries in torch's wheel
CACHE_VARIABLE = "TRITON_CACHE_DIR"
_PROGRAM = "#include <Python.h>\n#include <stdlib.h>\n"


def why_no_device(torch_version: str, cuda_version: str | None, root: Path = Path("/")) -> tuple[str, str]:
    """Return two texts for a log or an error: why torch cannot use a GPU that the driver lists, and what to do.

    `cuda_version` is `torch.version.cuda`, None for a build without CUDA.
    """
    release = torch_version.partition("+")[0]
    install = f"pip install --force-reinstall torch=={release} --index-url, with the address that pytorch.org gives for"
    if cuda_version is None:
        return f"torch {torch_version} is built without CUDA", f"Install a build with CUDA: {install} one"
    found, oldest = _driver_version(root), OLDEST_DRIVERS.get(cuda_version.partition(".")[0])
    reason = f"the NVIDIA driver is {found or 'of an unknown version'}, and torch {torch_version} is built for CUDA "
    reason += f"{cuda_version}, which needs driver {oldest or 'of its time'} or newer"
    major = None if found is None else int(found.partition(".")[0])
    if major is not None and oldest is not None and major >= oldest:
        return reason, "nvidia-smi and the kernel's log (dmesg) say why the driver does not start"
    if major is not None and major < OLDEST_DRIVERS["12"]:
        return reason, "Update the driver"
    return reason, f"Update the driver, or install the build for CUDA 12.6: {install} cu126"


def check_compiler() -> None:
    """Raise ConfigError unless C programs that include Python.h can be compiled, as Triton does at its first launch."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise _needs("a C compiler, but neither gcc nor clang is on the PATH, and CC is not set")
    scheme = sysconfig.get_default_scheme()
    include = sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
    command = [compiler, "-fsyntax-only", f"-I{include}", "-x", "c", "-"]
    try:
        run = subprocess.run(command, input=_PROGRAM, capture_output=True, text=True, check=False)  # noqa: S603
    except OSError as error:
        raise _needs(f"a C compiler, but {compiler} (CC) cannot be started: {error.strerror}") from error
    if run.returncode:
        missing = re.search(r"(\S+\.h)\W", run.stderr)
        what = missing[1] if missing else "one of them"
        raise _needs(f"C's and Python's headers, but {Path(compiler).name} does not find {what}")


def ensure_kernel_cache() -> None:
    """Give Triton a private folder for compiled kernels if its own is not writable.

    The private folder is removed when the process ends. Raises ConfigError if it cannot be made either.
    """
    home = Path(os.environ.get("TRITON_HOME") or Path("~").expanduser())
    folder = Path(os.environ.get(CACHE_VARIABLE) or home / ".triton" / "cache")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        reason = error.strerror
    try:
        private = tempfile.mkdtemp(prefix="headrace-kernels-")
    except OSError as error:
        raise ConfigError(
            CACHE_VARIABLE,
            str(folder),
            allowed=f"compiled kernels cannot be written there ({reason}), nor to a temporary folder",
            hint="Mount a volume there, or start the container with --tmpfs /tmp",
        ) from error
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    os.environ[CACHE_VARIABLE] = private  # for ranks, too, which start later
    logger.warning(
        "Triton's cache %s is not writable (%s); using a temporary folder, so every start compiles the kernels anew. "
        "Set TRITON_CACHE_DIR to a writable folder, or mount a volume there.",
        folder,
        reason,
    )


def _needs(what: str) -> ConfigError:
    return ConfigError(
        "device",
        "cuda",
        allowed=f"Triton needs {what}",
        hint="On Debian and Ubuntu: apt install gcc libc6-dev python3-dev. device=cpu works without",
    )


def _driver_version(root: Path) -> str | None:
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module\D*?(?:x86_64|aarch64)?\s+(\d+\.\d+(?:\.\d+)*)", text)
    return None if found is None else found[1]
