"""Builds the C++ library of gpu/cpu and the C++ extension of app/http. The rest of the project is in pyproject.toml.

The library is built once for each kind of processor, and Headrace chooses a build when it starts. Without a build for
the processor, models run on torch. Without the extension, Python sends the frames. Neither stops the installation.
"""

import platform
import runpy
from copy import copy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = sorted(str(path) for path in Path("gpu/cpu/csrc").glob("*.cpp"))
HEADERS = sorted(str(path) for path in Path("gpu/cpu/csrc").glob("*.h"))
FLAGS = ["-std=c++17", "-O3", "-g0", "-fno-math-errno", "-Wno-psabi", "-Wno-maybe-uninitialized"]
BUILDS = runpy.run_path("gpu/cpu/builds.py")["BUILDS"]


class BuildApart(build_ext):
    """All builds at once, each with the objects in a folder of its own: they come from the same sources."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = True

    def build_extension(self, ext: Extension) -> None:
        apart = copy(self)
        apart.build_temp = str(Path(self.build_temp) / ext.name)
        super(BuildApart, apart).build_extension(ext)


setup(
    ext_modules=[
        Extension(
            f"gpu.cpu.{name}",
            SOURCES,
            depends=HEADERS,
            language="c++",
            extra_compile_args=[*FLAGS, *build.options],
            extra_link_args=["-pthread"],
            optional=True,
        )
        for name, build in BUILDS.items()
        if platform.machine() == build.machine
    ]
    + [
        Extension(
            "app.http._step_writes",
            ["app/http/csrc/step_writes.cpp"],
            language="c++",
            extra_compile_args=["-std=c++20", "-O2", "-g0"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildApart},
)
