"""Builds the C++ library of gpu/cpu; everything else about the project is in pyproject.toml.

One build for each kind of processor that it is for, so that an installed Headrace chooses when it starts. Elsewhere,
and where there is no compiler, the installation goes on without, and models run on torch.
"""

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = sorted(str(path) for path in Path("gpu/cpu/csrc").glob("*.cpp"))
HEADERS = sorted(str(path) for path in Path("gpu/cpu/csrc").glob("*.h"))
FLAGS = ["-std=c++17", "-O3", "-g0", "-fno-math-errno", "-Wno-psabi", "-Wno-maybe-uninitialized"]
VNNI = ["-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]
BF16 = [*VNNI, "-mavx512bf16"]
AMX = [*BF16, "-mamx-tile", "-mamx-bf16"]
BUILDS = {"_kernels_vnni": VNNI, "_kernels_bf16": BF16, "_kernels_amx": AMX}  # gpu/cpu/library.py has their names too


class BuildApart(build_ext):
    """Keeps the objects of each build in a folder of their own: they come from the same sources."""

    def build_extension(self, ext: Extension) -> None:
        shared = self.build_temp
        self.build_temp = str(Path(shared) / ext.name)
        try:
            super().build_extension(ext)
        finally:
            self.build_temp = shared


setup(
    ext_modules=[
        Extension(
            f"gpu.cpu.{name}",
            SOURCES,
            depends=HEADERS,
            language="c++",
            extra_compile_args=[*FLAGS, *flags],
            extra_link_args=["-pthread"],
            optional=True,
        )
        for name, flags in BUILDS.items()
        if platform.machine() == "x86_64"
    ],
    cmdclass={"build_ext": BuildApart},
)
