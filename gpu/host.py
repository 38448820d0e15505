"""The machine: cores, memory, processor flags, shared memory.

In a container the machine's own figures are too large, so the limits of control groups apply, too. For tests, the
functions take the root of the file system. Linux only; a missing file means no limit.
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
    """Return the number of physical cores that this process may run on, at least 1.

    Two hyper-threads of one core count once: matrix products fill the core's vector units alone, and a second thread
    only competes for them. A CPU quota (`docker run --cpus`) lowers the number, since threads beyond it are throttled.
    """
    cores = {_core_of(cpu, root) for cpu in os.sched_getaffinity(0)}
    return max(1, math.ceil(min(len(cores), _cpu_quota(root))))


def available_memory(root: Path = _ROOT) -> int:
    """Return the bytes that can still be used without swapping or being killed."""
    limits = [_meminfo_available(root)]
    for group in _cgroup_directories(root, "memory"):
        # The kernel frees cached file pages before it enforces the limit.
        stat = _read(group / "memory.stat")
        cached = next((int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file ")), 0)
        for names in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):  # cgroup versions 2 and 1
            limit, usage = (_read(group / f"memory.{name}") for name in names)
            if limit.isdigit() and usage.isdigit():
                limits.append(max(0, int(limit) - int(usage) + cached))
    return min(limits)


def total_memory(root: Path = _ROOT) -> int:
    """Return the bytes of the machine's memory, or of the smallest limit of a control group."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for group in _cgroup_directories(root, "memory"):
        found = (_read(group / name) for name in ("memory.max", "memory.limit_in_bytes"))
        limits += [int(limit) for limit in found if limit.isdigit()]
    return min(limits)


def process_memory(pid: int, root: Path = _ROOT) -> int | None:
    """Return the bytes of a process's pages, where those that processes share count in part for each; None if the
    system does not say."""
    lines = (line.split() for line in _read(root / f"proc/{pid}/smaps_rollup").splitlines())
    return next((int(words[1]) * 1024 for words in lines if words[0] == "Pss:"), None)


def processor_flags(root: Path = _ROOT) -> frozenset[str]:
    """Return the processor's features by their names in /proc/cpuinfo: "avx2", "avx512_bf16"."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.split()[2:])
    return frozenset()


def processor_name(root: Path = _ROOT) -> str:
    """Return the processor's model by /proc/cpuinfo; empty if it is not there."""
    lines = _read(root / "proc/cpuinfo").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def has_bfloat16_instructions(root: Path = _ROOT) -> bool:
    """Return True if the processor multiplies bfloat16 natively; emulated, it is slower than float32."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(processor_flags(root))


def has_torch() -> bool:
    """Return True if torch is installed, without importing it, which takes a second."""
    return find_spec("torch") is not None


def cuda_devices(root: Path = _ROOT) -> list[str]:
    """Return the CUDA devices that this process may use, by CUDA_VISIBLE_DEVICES or /dev. Asks no driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for part in visible.split(",") if (name := part.strip()) and name != "-1"]
    nodes = [node for node in root.glob("dev/nvidia*") if node.name.removeprefix("nvidia").isdigit()]
    return [str(index) for index in range(len(nodes))]  # CUDA numbers the present devices from 0


def _core_of(cpu: int, root: Path) -> tuple[str, str]:
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    return _read(topology / "physical_package_id"), _read(topology / "core_id") or f"cpu{cpu}"


def _cpu_quota(root: Path) -> float:
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
    """Yield the groups of this process, innermost first, for versions 1 and 2. The limits of all of them hold."""
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


def allocate(descriptor: int, num_bytes: int, offset: int = 0) -> None:
    """Extend a file of shared memory to at least this size, and allocate the memory now: otherwise the kernel would
    kill (SIGBUS) a process that touches a page for which there is no memory. Raises HeadraceError."""
    try:
        os.posix_fallocate(descriptor, offset, num_bytes)
    except OSError as error:
        raise HeadraceError(
            f"The system refuses {num_bytes / 2**20:,.1f} MiB of shared memory ({error.strerror}). A smaller "
            "max_num_batched_tokens, tensor_parallel_size or pipeline_parallel_size needs less."
        ) from error
