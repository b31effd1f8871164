"""Plain Ray Train at its defaults on local one-CPU nodes: ``python -m benchmarks.elastic_ray
WORKLOAD DIRECTORY NODES``.

Elastic workers, unlimited failures, everything else as Ray ships it. Writes nodes.json with the
processes of each node, trains until DIRECTORY/stop exists. DIRECTORY/address says where another
node may join.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.cluster_utils import Cluster
from ray.train.torch import TorchTrainer

from benchmarks.elastic_loop import train


def train_fn(config: dict[str, Any]) -> None:
    directory = Path(config["directory"])

    def load() -> dict[str, Any] | None:
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return None
        with checkpoint.as_directory() as path:
            return dict(torch.load(Path(path) / "state.pt", weights_only=True))

    def save(state: dict[str, Any], rank: int) -> None:
        with tempfile.TemporaryDirectory() as path:
            checkpoint = None
            if rank == 0:
                torch.save(state, Path(path) / "state.pt")
                checkpoint = ray.train.Checkpoint.from_directory(path)
            ray.train.report({"step": state["step"]}, checkpoint=checkpoint)

    train(config["workload"], directory / "steps", directory / "stop", load, save)


def main(workload: str, directory: Path, num_nodes: int) -> None:
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(num_nodes)]
        raylets = {
            node.node_id: [
                info.process.pid for infos in node.all_processes.values() for info in infos
            ]
            for node in nodes
        }
        (directory / "nodes.json").write_text(json.dumps(raylets))
        (directory / "address").write_text(cluster.address)
        ray.init(address=cluster.address, log_to_driver=False)
        TorchTrainer(
            train_fn,
            train_loop_config={"directory": str(directory), "workload": workload},
            scaling_config=ray.train.ScalingConfig(num_workers=(1, num_nodes)),
            run_config=ray.train.RunConfig(
                name="plain",
                storage_path=str(directory / "ray"),
                failure_config=ray.train.FailureConfig(max_failures=-1),
            ),
        ).fit()
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
