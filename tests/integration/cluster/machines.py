"""Machines of a Ray cluster, as far as Ray can tell, and nothing left of them afterwards.

`python -m tests.integration.cluster.machines` prints the address of the cluster. With numbers, there are as many
machines, of so many cores each. With a configuration file, as `serve run` takes it, Serve is on them. SIGTERM ends it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Before it is imported, which reads it.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5"}

from ray.cluster_utils import Cluster

FAREWELL_SECONDS = 20.0


@contextmanager
def machines(*num_cpus: int) -> Iterator[Cluster]:
    """Start a cluster whose machines have so many cores each."""
    home = tempfile.mkdtemp(prefix="hr-ray-")
    # Ray writes the cluster's address to this folder, whatever `temp_dir` says, and does not create it.
    os.environ["RAY_TMPDIR"] = home
    Path(home, "ray").mkdir()
    small = {"object_store_memory": 80 * 2**20}
    cluster = Cluster(shutdown_at_exit=False)
    try:
        cluster.add_node(**small, num_cpus=num_cpus[0], include_dashboard=False, temp_dir=home)
        for cores in num_cpus[1:]:
            cluster.add_node(**small, num_cpus=cores)
        yield cluster
    finally:
        try:
            cluster.shutdown()
        finally:
            _kill_all(home)
            shutil.rmtree(home, ignore_errors=True)


def _kill_all(home: str) -> None:
    """What Ray has left: of a machine that did not come up, or was told to end meanwhile, it knows nothing."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if home in command.read_text():
                os.kill(int(command.parent.name), signal.SIGKILL)


def main(*arguments: str) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    # Whoever is started in the background ignores it, and so would Serve.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    configuration = next((each for each in arguments if not each.isdigit()), None)
    with machines(*(map(int, arguments) if arguments and configuration is None else (1, 1))) as cluster:
        if configuration is None:
            print(cluster.address, flush=True)
            signal.pause()
            return
        command = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", cluster.address, configuration]
        serve = subprocess.Popen(command)
        try:
            serve.wait()
        finally:
            serve.send_signal(signal.SIGINT)
            try:
                serve.wait(FAREWELL_SECONDS)
            except subprocess.TimeoutExpired:  # the machines go in any case
                serve.kill()
                serve.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
