"""`python -m tests.integration.chaos.with_listener DESCRIPTOR MODULE ARGUMENT...` runs a module with a socket unit.

As systemd does it: the descriptor becomes number three, and two variables say so.
"""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    descriptor, module, *arguments = sys.argv[1:]
    os.dup2(int(descriptor), 3)
    os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
