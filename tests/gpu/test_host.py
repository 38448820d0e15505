"""The machine as a container sees it."""

import os
from collections.abc import Mapping
from pathlib import Path

from gpu.host import available_memory, cuda_devices, has_bfloat16_instructions, process_memory, usable_cores

GIB = 2**30


def write(root: Path, files: Mapping[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def test_memory_is_what_the_kernel_calls_available(tmp_path: Path):
    root = write(tmp_path, {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB"})
    assert available_memory(root) == 8 * GIB


def test_the_tightest_control_group_limits_the_memory(tmp_path: Path):
    group = "sys/fs/cgroup/outer/inner"
    root = write(
        tmp_path,
        {
            "proc/meminfo": f"MemAvailable: {64 * GIB // 1024} kB",
            "proc/self/cgroup": "0::/outer/inner",
            f"{group}/memory.max": "max",
            f"{group}/memory.current": GIB,
            "sys/fs/cgroup/outer/memory.max": 4 * GIB,
            "sys/fs/cgroup/outer/memory.current": 3 * GIB,
            "sys/fs/cgroup/outer/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}",
        },
    )
    assert available_memory(root) == 3 * GIB  # page cache is given back


def test_version_1_limits_and_a_path_of_the_host_are_understood(tmp_path: Path):
    root = write(
        tmp_path,
        {
            "proc/meminfo": f"MemAvailable: {64 * GIB // 1024} kB",
            "proc/self/cgroup": "4:memory:/docker/0123\n3:cpuset:/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 2 * GIB,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": GIB,
        },
    )
    assert available_memory(root) == GIB


def test_hyper_threads_of_one_core_count_once(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 9})
    topology = "sys/devices/system/cpu/cpu{}/topology/{}"
    for cpu, (package, core) in {0: (0, 0), 1: (0, 0), 2: (0, 1), 3: (1, 0)}.items():
        files = {topology.format(cpu, "physical_package_id"): package, topology.format(cpu, "core_id"): core}
        write(tmp_path, files)
    assert usable_cores(tmp_path) == 4  # of cpu9 nothing is known, so it counts for itself


def test_a_cpu_quota_lowers_the_cores(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    write(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "250000 100000"})
    assert usable_cores(tmp_path) == 3
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "10000 100000"})
    assert usable_cores(tmp_path) == 1
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "max 100000"})
    assert usable_cores(tmp_path) == 64


def test_bfloat16_is_recognized_by_the_processors_flags(tmp_path: Path):
    assert not has_bfloat16_instructions(write(tmp_path, {"proc/cpuinfo": "flags : fpu avx512f avx512_bf16x"}))
    assert has_bfloat16_instructions(write(tmp_path, {"proc/cpuinfo": "processor : 0\nflags : fpu avx512_bf16 sse"}))
    assert has_bfloat16_instructions(write(tmp_path, {"proc/cpuinfo": "Features : fp asimd bf16"}))


def test_a_process_counts_with_its_share_of_common_pages(tmp_path: Path):
    rollup = "5567-7ffe ---p 00000000 00:00 0 [rollup]\nRss:  300 kB\nPss:  200 kB\nPss_Anon: 1 kB"
    write(tmp_path, {"proc/7/smaps_rollup": rollup})
    assert process_memory(7, tmp_path) == 200 * 1024
    assert process_memory(8, tmp_path) is None


def test_cuda_devices_are_those_that_are_visible(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cuda_devices(tmp_path) == []
    write(tmp_path, {f"dev/nvidia{name}": "" for name in ("0", "3", "ctl", "-uvm")})
    assert cuda_devices(tmp_path) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,MIG-1")
    assert cuda_devices(tmp_path) == ["3", "MIG-1"]
    for nothing in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        assert cuda_devices(tmp_path) == []


def test_this_machine_has_something_to_offer():
    assert usable_cores() >= 1
    assert available_memory() > 0
