"""Ranks on one GPU over NCCL while their group changes its size: it grows from one to three, and a
node is drained. Who stays keeps its process and its tensors, and no step is lost."""

from __future__ import annotations

from pathlib import Path

import torch

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from tests.chaos.test_phases import PATIENCE
from tests.gpu.parts.two_ranks import cluster_of
from tests.gpu.verdict import Shown
from tests.integration.driven_run import SMALL, DrivenRun
from tests.integration.ray_cluster import RayCluster

SETTLED_STEPS = 20


def run(device: torch.device, directory: Path) -> Shown:
    on_gpu = device.type == "cuda"
    with cluster_of(1, device, directory) as cluster:
        trained = DrivenRun(cluster, directory / "run", _spec(on_gpu=on_gpu))
        try:
            trained.start(**PATIENCE)
            _change_size(trained, cluster)
        finally:
            print(trained.describe(), flush=True)  # for the log
            trained.stop()
    restored = [(each.data["source"], each.data["step"]) for each in trained.of(EventKind.RESTORED)]
    assert [source for source, _ in restored] == ["fresh", *["process"] * 3], restored
    steps = [step for step, _ in trained.steps()]
    assert steps == list(range(1, len(steps) + 1)), "a step was taken twice, or lost"
    groups = [
        {worker["pid"] for worker in event.data["workers"]}
        for event in trained.of(EventKind.ATTEMPT_STARTED)
    ]
    assert [len(group) for group in groups] == [1, 2, 3, 2], f"processes of the attempts: {groups}"
    assert groups[0] < groups[1] < groups[2] > groups[3], f"processes of the attempts: {groups}"
    pauses = ", ".join(f"{_pause_s(trained, step):.2f}" for _, step in restored[1:])
    return Shown(
        f"1, 2, 3 and, after a drain, 2 ranks: {len(steps)} steps, none twice, from the ranks' own "
        f"memory; {pauses} s without a step",
        "" if on_gpu else "NCCL, CUDA tensors that stay on their device",
    )


def _change_size(trained: DrivenRun, cluster: RayCluster) -> None:
    """Go on with two ranks, with three, and with two again, and end the run."""
    trained.wait_for_step(SETTLED_STEPS)
    for number in (2, 3):
        cluster.add_node()
        _wait_for_group(trained, number)
    cluster.drain_node(trained.worker(1)["node_id"], deadline_s=60)
    _wait_for_group(trained, 4)
    trained.run_dir.request_stop(1, "cancel")
    trained.wait_for_end()
    trained.read_all()


def _wait_for_group(trained: DrivenRun, number: int) -> None:
    """Wait until attempt ``number`` trains."""
    trained.wait_for(
        lambda: sum(attempt == number for _, attempt in trained.steps()) > SETTLED_STEPS,
        f"steps of attempt {number}",
    )


def _pause_s(trained: DrivenRun, step: int) -> float:
    """Return the seconds between a step and the next one, by the ranks' own clocks."""
    points = (point for each in trained.of(EventKind.METRICS) for point in each.data["points"])
    at = {point["step"]: point["at"] for point in points}
    return float(at[step + 1] - at[step])


def _spec(*, on_gpu: bool) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "gpu-hand-over",
            "task": SMALL,
            "train": {"epochs": 100_000, "global_batch_size": 60, "micro_batch_size": 10},
            "scaling": {"min_workers": 1, "max_workers": 3, "use_gpu": on_gpu},
            "checkpoint": {"every_steps": None},
        }
    )
