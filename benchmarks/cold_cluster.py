"""A Ray cluster as somebody else set it up, without anything that Everstep asks of a cluster of its
own: ``python -m benchmarks.cold_cluster DIRECTORY NODES DASHBOARD_PORT``.

Local nodes of one CPU beside a head without any, and without tokens, which Ray would write into the
user's home. DIRECTORY/ready says that they are there; they end once DIRECTORY/stop is.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def main(directory: Path, num_nodes: int, dashboard_port: int) -> None:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    from ray.cluster_utils import Cluster  # reads that when it is imported

    head = {
        "num_cpus": 0,
        "include_dashboard": True,
        "dashboard_host": "127.0.0.1",
        "dashboard_port": dashboard_port,
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(num_nodes):
            cluster.add_node(num_cpus=1)
        (directory / "ready").touch()
        while not (directory / "stop").exists():
            time.sleep(0.2)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
