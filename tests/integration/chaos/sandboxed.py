"""`python -m tests.integration.chaos.sandboxed UNIT MODULE ARGUMENT...` runs a module under a systemd unit's limits.

These are the limits that a process can set for itself: system calls, address families, memory that is written and run,
capabilities.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
AUDIT_ARCH_X86_64 = 0xC000003E
PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_MDWE = 22, 24, 38, 65
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # where they are in seccomp's data
LOAD, IF_EQUAL, RETURN = 0x20, 0x15, 0x06
KILL, REFUSE, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000


def values(unit: str, name: str) -> list[str]:
    """What a setting is given, in order."""
    return re.findall(rf"^{name}=(.*)$", unit, re.MULTILINE)


def members(name: str) -> set[str]:
    """The system calls of a group such as @system-service, or this one."""
    if not name.startswith("@"):
        return {name}
    command = ["systemd-analyze", "syscall-filter", name]
    _, *lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    words = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    return {call for word in words for call in members(word)}


def allowed_calls(unit: str) -> set[str]:
    calls = members("@default")
    for value in values(unit, "SystemCallFilter"):
        listed = {call for name in value.removeprefix("~").split() for call in members(name)}
        calls = calls - listed if value.startswith("~") else calls | listed
    return calls | {"execve"}


def program(unit: str) -> bytes:
    """Classic BPF: another architecture ends the process, another family or call is refused."""
    defined = re.findall(r"#define __NR_(\w+)\s+(\d+)", HEADER.read_text())
    numbers = {name: int(number) for name, number in defined}
    families = [getattr(socket, name) for name in values(unit, "RestrictAddressFamilies")[-1].split()]
    steps = [(LOAD, 0, 0, ARCHITECTURE), (IF_EQUAL, 1, 0, AUDIT_ARCH_X86_64), (RETURN, 0, 0, KILL)]
    steps += [(LOAD, 0, 0, NUMBER), (IF_EQUAL, 0, len(families) + 2, numbers["socket"]), (LOAD, 0, 0, FIRST_ARGUMENT)]
    steps += [(IF_EQUAL, len(families) - index, 0, family) for index, family in enumerate(families)]
    steps += [(RETURN, 0, 0, REFUSE | 97), (LOAD, 0, 0, NUMBER)]
    for number in sorted(numbers[name] for name in allowed_calls(unit) & numbers.keys()):
        steps += [(IF_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("HBBI", *step) for step in [*steps, (RETURN, 0, 0, REFUSE | 1)])


def enter(unit: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    steps = program(unit)
    buffer = ctypes.create_string_buffer(steps)
    filter_ = ctypes.create_string_buffer(struct.pack("HP", len(steps) // 8, ctypes.addressof(buffer)))
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    if values(unit, "MemoryDenyWriteExecute")[-1] == "yes":
        libc.prctl(PR_SET_MDWE, 1, 0, 0, 0)  # of Linux 6.3
    assert libc.prctl(PR_SET_SECCOMP, 2, filter_, 0, 0) == 0, os.strerror(ctypes.get_errno())
    with suppress(OSError):
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
        raise AssertionError("the filter is not in force")


if __name__ == "__main__":
    enter(Path(sys.argv[1]).read_text())
    os.execv(sys.executable, [sys.executable, "-m", *sys.argv[2:]])
