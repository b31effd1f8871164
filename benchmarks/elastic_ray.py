"""Plain Ray Train at its defaults on local one-CPU nodes: ``python -m benchmarks.elastic_ray
WORKLOAD DIRECTORY NODES [torchft]``.

Elastic workers, unlimited failures, everything else as Ray ships it. Writes nodes.json with the
processes of each node, trains until DIRECTORY/stop says so. DIRECTORY/address says where another
node may join. With ``torchft``, its ``TorchftConfig`` keeps one replica group a node, at torchft's
defaults; Ray does not combine that with elastic sizes.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.cluster_utils import Cluster
from ray.train.torch import TorchTrainer

from benchmarks import elastic_torchft
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

    train(config["workload"], directory, load, save)


def torchft_fn(config: dict[str, Any]) -> None:
    number = ray.train.get_context().get_world_rank()
    lighthouse = os.environ["TORCHFT_LIGHTHOUSE"]
    elastic_torchft.train(number, lighthouse, config["workload"], Path(config["directory"]))


def main(workload: str, directory: Path, num_nodes: int, torchft: bool) -> None:
    # Ray's actor for torchft's lighthouse asks for a CPU of the head.
    head = {"num_cpus": int(torchft), "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    config, scaling = None, ray.train.ScalingConfig(num_workers=(1, num_nodes))
    if torchft:
        from ray.train.v2.torch.torchft_config import TorchftConfig

        config = TorchftConfig(lighthouse_kwargs={"min_replicas": 1}, backend="gloo")
        scaling = ray.train.ScalingConfig(
            num_workers=num_nodes, resources_per_worker={"CPU": 1, "node": 1}
        )
    try:
        nodes = [cluster.add_node(num_cpus=1, resources={"node": 1}) for _ in range(num_nodes)]
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
            torchft_fn if torchft else train_fn,
            train_loop_config={"directory": str(directory), "workload": workload},
            scaling_config=scaling,
            torch_config=config,
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
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] == ["torchft"])
