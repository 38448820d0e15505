"""Builds the C++ library of gpu/cpu; everything else about the project is in pyproject.toml.

One build for each step of a processor's instruction set, so that an installed Headrace chooses when it starts. Where
there is no compiler the installation goes on without, and the model runs on torch.
"""

import platform
from pathlib import Path

from setuptools import Extension, setup

SOURCES = sorted(str(path) for path in Path("gpu/cpu/csrc").glob("*.cpp"))
HEADERS = sorted(str(path) for path in Path("gpu/cpu/csrc").glob("*.h"))
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-g0", "-Wno-psabi", "-Wno-maybe-uninitialized"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx512bf16"]

builds = {"_kernels": []}
if platform.machine() == "x86_64":
    builds |= {"_kernels_avx2": AVX2, "_kernels_avx512": AVX2 + AVX512}

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
        for name, flags in builds.items()
    ]
)
