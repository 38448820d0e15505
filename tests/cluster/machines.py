"""`python -m tests.cluster.machines FILE`: two machines of a Ray cluster, as far as Ray can tell, with Serve on them.

FILE is a configuration as `serve run` takes it. Ends with SIGTERM, and everything that it has started with it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile

# Before it is imported, which reads it.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5"}

from ray.cluster_utils import Cluster

SMALL = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


def main(configuration: str) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    home = tempfile.mkdtemp(prefix="hr-ray-")
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**SMALL, "include_dashboard": False, "temp_dir": home},
        shutdown_at_exit=False,
    )
    try:
        cluster.add_node(**SMALL)
        command = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", cluster.address, configuration]
        serve = subprocess.Popen(command)
        try:
            serve.wait()
        finally:
            serve.send_signal(signal.SIGINT)
            serve.wait()
    finally:
        cluster.shutdown()
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
