"""The extension that sends the frames of a step, under the compiler's sanitizers. They look for wrong addresses,
undefined behaviour, and races between the event loop and the helper thread."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.gpu.native_builds import COMPILER, assert_tests_pass

ROOT = Path(__file__).parents[3]
# The sanitizer watches a process that runs this script, which loads the sanitizer's build of the extension.
RUN = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("app.http._step_writes", sys.argv[1])
import app.http
app.http._step_writes = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(app.http._step_writes)
import pytest
sys.exit(pytest.main(["-p", "no:cacheprovider", "--capture=no", "-m", "", "-k", sys.argv[3], sys.argv[2]]))
"""


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("flags", "libraries", "tests"),
    [
        pytest.param("address,undefined", ("libasan.so", "libubsan.so"), "not python", id="addresses"),
        pytest.param("thread", ("libtsan.so",), "batch or sockets", id="races"),  # others take minutes
    ],
)
def test_frames_are_sent_without_races_and_from_memory_that_is_theirs(
    flags: str, libraries: tuple[str, ...], tests: str, tmp_path: Path
) -> None:
    extension = tmp_path / f"_step_writes{sysconfig.get_config_var('EXT_SUFFIX')}"
    command = [COMPILER, "-std=c++20", "-O1", "-g1", "-fPIC", "-shared", "-pthread", f"-fsanitize={flags}"]
    command += [f"-I{sysconfig.get_path('include')}", str(ROOT / "app/http/csrc/step_writes.cpp"), "-o", str(extension)]
    subprocess.run([*command, "-fno-sanitize-recover=all"], check=True)
    its_tests = str(ROOT / "tests/app/http/test_step_writes.py")
    assert_tests_pass(RUN, [str(extension), its_tests, tests], *libraries)
