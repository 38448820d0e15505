"""How the library is called: what it cannot do is an exception of Python's, and never the end of the process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpu.cpu.library
from gpu.cpu.library import built, usable
from tests.gpu.native_builds import needs_library
from tests.selection import slow_except

pytestmark = needs_library
RUNNABLE = [library.name for library in usable()]
each_build = pytest.mark.parametrize("build", slow_except(RUNNABLE, *RUNNABLE[:1]))

IMPORTS = """
import os, resource, sys, threading, time
import numpy as np, torch
from gpu.cpu.library import Threads, load_library, usable
from gpu.cpu.weights import pack
from gpu.cpu.weights import WeightBuffer
library = next(library for library in usable() if sys.argv[1:] in ([], [library.name]))
matrix = pack(library, WeightBuffer(), [np.ones((16, 96), np.float32)])
"""
OUT_OF_MEMORY = """
threads, x, out = Threads(library, 2), torch.ones(20, 96), torch.empty(20, 16)
def multiply(rows):
    library.functions.hr_multiply(threads.handle, matrix.struct, x.data_ptr(), rows, 0, None, out.data_ptr(), 16)
multiply(10)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
try:
    multiply(2**22)  # 0.75 GiB of rows to keep in 16 bits, twice that in 32, before the first is read
except MemoryError as error:
    print(error)
else:
    os._exit(1)  # it has read beyond its rows
multiply(20)
print((out == 96).all().item())
"""
FIRST_CALL_WITHOUT_MEMORY = """
import ctypes
threads, x, out = Threads(library, 2), torch.ones(20, 96), torch.empty(20, 16)
def multiply():
    library.functions.hr_multiply(threads.handle, matrix.struct, x.data_ptr(), 20, 0, None, out.data_ptr(), 16)
time.sleep(0.2)  # the other thread begins
libc, held = ctypes.CDLL(None), []
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used, limits[1]))
while block := libc.malloc(2**15):
    held.append(block)
try:
    multiply()
except MemoryError:
    pass
for block in held:
    libc.free(block)
resource.setrlimit(resource.RLIMIT_AS, limits)
multiply()
print((out == 96).all().item())
"""
MULTIPLIES = """
threads, x, out = Threads(library, 2), torch.ones(20, 96), torch.empty(20, 16)
library.functions.hr_multiply(threads.handle, matrix.struct, x.data_ptr(), 20, 0, None, out.data_ptr(), 16)
print(library.name, (out == 96).all().item())
"""
ENDS_IN_A_CALL = """
x, out = torch.ones(40_000, 96), torch.empty(40_000, 16)
threads = Threads(library, 2)
def call_for_ever():
    while True:
        library.functions.hr_multiply(threads.handle, matrix.struct, x.data_ptr(), 40_000, 0, None, out.data_ptr(), 16)
threading.Thread(target=call_for_ever, daemon=True).start()
time.sleep(0.1)
print("over")
"""

# Without torch, which asks for the tiles too. The filter: where the call is arch_prctl and its first argument asks
# for tiles, refuse. It ends with the process.
REFUSED = """
import ctypes, errno, struct
from gpu.cpu.library import usable
code = [(0x20, 0, 0, 0), (0x15, 0, 3, 158), (0x20, 0, 0, 16), (0x15, 0, 1, 0x1023), (0x06, 0, 0, 0x50000 | errno.EPERM),
        (0x06, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in code))
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 6, ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges, as a filter wants it
assert libc.prctl(22, 2, filter, 0, 0) == 0
print(*(library.name for library in usable()))
"""

FORKS = """
threads, x, out = Threads(library, 3), torch.ones(20, 96), torch.empty(20, 16)
def multiply(threads):
    library.functions.hr_multiply(threads.handle, matrix.struct, x.data_ptr(), 20, 0, None, out.data_ptr(), 16)
multiply(threads)
if (child := os.fork()) == 0:
    try:
        multiply(threads)
    except RuntimeError as error:
        print(error)
    del threads
    multiply(Threads(library, 3))
    print((out == 96).all().item(), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
multiply(threads)
"""


def run(script: str, imports: str = IMPORTS, *arguments: str) -> str:
    process = subprocess.run(
        [sys.executable, "-c", imports + script, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[3],
    )
    assert process.returncode == 0, (process.returncode, process.stderr)
    return process.stdout


@each_build
def test_a_call_that_finds_no_memory_says_so_and_the_next_one_works(build: str):
    assert run(OUT_OF_MEMORY, IMPORTS, build) == "hr_multiply could not allocate its working memory\nTrue\n"


@each_build
def test_a_first_call_that_finds_no_memory_does_not_end_the_process(build: str):
    assert run(FIRST_CALL_WITHOUT_MEMORY, IMPORTS, build) == "True\n"


def test_an_interpreter_that_ends_within_a_call_ends_well():
    assert run(ENDS_IN_A_CALL) == "over\n"


def test_a_forked_process_cannot_use_its_parents_threads_and_may_have_its_own():
    told = "hr_multiply was called with threads of another process: a forked process needs threads of its own"
    assert run(FORKS) == f"{told}\nTrue\n"


def test_where_the_kernel_refuses_tiles_the_next_build_computes():
    allowed = [library.name for library in usable()]
    names = run(REFUSED, imports="").split()
    assert "_kernels_amx" not in names
    assert names == [name for name in allowed if name != "_kernels_amx"]
    if "_kernels_amx" in allowed:
        model = f"{REFUSED}{IMPORTS}{MULTIPLIES}"
        assert run(model, imports="").split() == [*names, names[0], "True"]


def test_the_suite_can_run_with_the_builds_of_an_older_processor(tmp_path: Path):
    names = {f"_kernels_{name}.cpython-311.so" for name in ("amx", "bf16", "avx512", "avx2")}
    for name in names:
        (tmp_path / name).touch()
    script = Path(__file__).parents[3] / ".ci/with_builds"
    seen = subprocess.run(
        ["bash", script, "avx2 avx512", "bash", "-c", 'ls "$FOLDER"; exit 3'],
        env=os.environ | {"FOLDER": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert seen.returncode == 3, "the command's own status is told"
    assert {name for name in seen.stdout.split() if name in names} == {
        "_kernels_avx512.cpython-311.so",
        "_kernels_avx2.cpython-311.so",
    }
    assert {path.name for path in tmp_path.iterdir()} == names, "all are back"


def test_a_build_older_than_its_sources_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for path in built().values():
        shutil.copy2(path, tmp_path)
    (tmp_path / "csrc").mkdir()
    source = tmp_path / "csrc" / "matrix.cpp"
    source.touch()
    monkeypatch.setattr(gpu.cpu.library, "FOLDER", tmp_path)
    for seconds_older, num_warnings in ((60, 1), (-60, 0)):
        caplog.clear()
        for path in tmp_path.glob("*.so"):
            os.utime(path, (0, source.stat().st_mtime - seconds_older))
        loaded = gpu.cpu.library.load_library.__wrapped__()
        assert loaded is not None
        warning = f"{loaded.path.name} is older than its sources in {tmp_path / 'csrc'}: run make"
        assert caplog.messages == [warning] * num_warnings
