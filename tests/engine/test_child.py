"""A process that forks others: its forks are children of the process that asked for them."""

from __future__ import annotations

import subprocess
import sys

FORKED = """
import os, sys
from engine.child_main import serve_forks
word, descriptor = serve_forks(int(sys.argv[-1]))
os.write(int(descriptor), word.encode())
if word == "stay":
    os.read(int(descriptor), 1)
os._exit(7)
"""

ASKING = f"""
import os, signal, socket, sys
from engine.child import ForkServer
forks = ForkServer([sys.executable, "-c", {FORKED!r}], os.environ)
ours, theirs = socket.socketpair()
ended = forks.fork("end", theirs.fileno())
assert ours.recv(9) == b"end"
assert ended.wait() == ended.poll() == 7
stays = forks.fork("stay", theirs.fileno())
assert ours.recv(9) == b"stay"
assert stays.poll() is None
forks.close()
assert stays.poll() is None, "it goes on"
stays.kill()
assert stays.wait() == -signal.SIGKILL
try:
    forks.fork("end", theirs.fileno())
except OSError:
    print("refused")
"""


def test_forks_are_children_whose_ends_are_known_and_go_on_without_the_process_that_forked_them() -> None:
    ended = subprocess.run([sys.executable, "-c", ASKING], capture_output=True, text=True, check=False, timeout=60)
    assert ended.stdout == "refused\n", ended.stderr
