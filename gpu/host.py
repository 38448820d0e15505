"""The machine: cores, memory, processor flags, shared memory.

Imported by the worker and the executor. In a container the machine's own figures are too large, so the limits of the
control groups count too. Every function takes the root of the file system for the sake of tests. Linux only; where a
file is missing its limit does not exist.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from engine.errors import HeadraceError

_ROOT = Path("/")


def usable_cores(root: Path = _ROOT) -> int:
    """Physical cores that this process may run on, at least 1.

    Two hyper-threads of one core count once: matrix products fill the core's vector units alone, and a second thread
    only competes for them. A CPU quota (`docker run --cpus`) lowers the number, since threads beyond it are throttled.
    """
    cores = {_core_of(cpu, root) for cpu in os.sched_getaffinity(0)}
    return max(1, math.ceil(min(len(cores), _cpu_quota(root))))


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that can still be used without swapping or being killed."""
    limits = [_meminfo_available(root)]
    for group in _cgroup_directories(root, "memory"):
        # What was last read from files is given back before the limit bites.
        stat = _read(group / "memory.stat")
        cached = next((int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file ")), 0)
        for limit_name, usage_name in (("memory.max", "memory.current"), _V1_MEMORY):
            limit, usage = _read(group / limit_name), _read(group / usage_name)
            if limit.isdigit() and usage.isdigit():
                limits.append(max(0, int(limit) - int(usage) + cached))
    return min(limits)


def processor_flags(root: Path = _ROOT) -> frozenset[str]:
    """What the processor can do, in the words of /proc/cpuinfo: "avx2", "avx512_bf16"."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.split()[2:])
    return frozenset()


def processor_name(root: Path = _ROOT) -> str:
    """The model of the processor, as /proc/cpuinfo has it; empty where it does not say."""
    lines = _read(root / "proc/cpuinfo").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def has_bfloat16_instructions(root: Path = _ROOT) -> bool:
    """Whether the processor multiplies bfloat16 natively; emulated, it is slower than float32."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(processor_flags(root))


def has_torch() -> bool:
    """Whether it is installed; it is not imported, which takes a second."""
    return find_spec("torch") is not None


def cuda_devices(root: Path = _ROOT) -> list[str]:
    """The CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES names them. Asks no driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for part in visible.split(",") if (name := part.strip()) and name != "-1"]
    nodes = [node for node in root.glob("dev/nvidia*") if node.name.removeprefix("nvidia").isdigit()]
    return [str(index) for index in range(len(nodes))]  # CUDA numbers those that are there from 0


_V1_MEMORY = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _core_of(cpu: int, root: Path) -> tuple[str, str]:
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    return _read(topology / "physical_package_id"), _read(topology / "core_id") or f"cpu{cpu}"


def _cpu_quota(root: Path) -> float:
    """How many cores' worth of time the control groups allow."""
    quotas = [math.inf]
    for group in _cgroup_directories(root, "cpu"):
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if not quota:
            quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():  # "max" and -1 mean no limit
            quotas.append(int(quota) / int(period))
    return min(quotas)


def _meminfo_available(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_directories(root: Path, controller: str) -> Iterator[Path]:
    """The groups that this process is in, innermost first; a limit of any of them holds. Versions 1 and 2."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        # Inside a container the path is often the host's and does not exist here; the mount's root then is the group.
        group = base / path.lstrip("/")
        yield group
        while group != base:
            group = group.parent
            yield group


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# -------------------------------------------------------------------------------------------------------- shared memory
# Memory that processes share: files of no disk, which are gone with the last descriptor and mapping.


def allocate(descriptor: int, num_bytes: int, offset: int = 0) -> None:
    """Make a file at least as long, and take the memory for it: who maps a file whose memory is found only when it is
    touched is killed (SIGBUS) where there is none. Raises HeadraceError."""
    try:
        os.posix_fallocate(descriptor, offset, num_bytes)
    except OSError as error:
        raise HeadraceError(
            f"The system refuses {num_bytes / 2**20:,.1f} MiB of memory that processes share ({error.strerror}). "
            "A smaller max_num_batched_tokens needs less, and so do a smaller tensor_ or pipeline_parallel_size."
        ) from error
