"""The builds of the C++ library, best first: the processor that each needs, and its compiler options.

setup.py runs this file before anything is installed, so it imports nothing of ours.
"""

from __future__ import annotations

from typing import NamedTuple


class Build(NamedTuple):
    """One build, for processors of one kind."""

    instructions: str  # for the log
    machine: str  # as in `platform.machine()`
    flags: frozenset[str]  # as in /proc/cpuinfo
    options: tuple[str, ...]  # compiler options


def _x86(instructions: str, *flags: str) -> Build:
    options = (f"-m{flag.replace('avx512_', 'avx512').replace('_', '-')}" for flag in flags)
    return Build(instructions, "x86_64", frozenset(flags), tuple(options))


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
_BF16 = (*_AVX512, "avx512_bf16")

# No build uses products of bytes (VNNI, ARM's dotprod and i8mm), because activations are never rounded to 8 bits.
# float16 is only read, which the plain build for 64-bit ARM can do too.
BUILDS = {
    "_kernels_amx": _x86("AMX and AVX-512 with BF16", *_BF16, "amx_tile", "amx_bf16"),
    "_kernels_bf16": _x86("AVX-512 with BF16", *_BF16),
    "_kernels_avx512": _x86("AVX-512", *_AVX512),
    "_kernels_avx2": _x86("AVX2", *_AVX2),
    "_kernels_neon_bf16": Build("NEON with BF16", "aarch64", frozenset({"asimd", "bf16"}), ("-march=armv8.2-a+bf16",)),
    "_kernels_neon": Build("NEON", "aarch64", frozenset({"asimd"}), ("-march=armv8-a",)),
}
