"""Ray Data in a Ray Train function: Parquet, ``map_batches`` and a streaming split over two ranks,
of which one is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from everstep.wire.events import EventKind
from tests.integration.driven_run import DrivenRun
from tests.integration.own_code_runs import begin, cluster, started
from tests.integration.ray_cluster import RayCluster
from tests.support.code_archives import tar_gz

__all__ = ["cluster", "started"]

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

ROWS, EPOCHS = 256, 30
MAPPED = """
def doubled(batch):
    batch["twice"] = 2 * batch["x"]
    return batch
"""
TRAIN = """
import tempfile, time
from pathlib import Path
import ray.data, ray.train, torch
import torch.distributed as dist
from mapped import doubled

def datasets(config):
    found = ray.data.read_parquet(config["path"]).map_batches(doubled)
    whole = ray.data.range(10)
    return {"train": found, "whole": whole}, ray.train.DataConfig(datasets_to_split=["train"])

def train_fn(config):
    shard, checkpoint = ray.train.get_dataset_shard("train"), ray.train.get_checkpoint()
    whole = sum(len(each["id"]) for each in ray.train.get_dataset_shard("whole").iter_batches())
    first = 0
    if checkpoint:
        with checkpoint.as_directory() as directory:
            first = int(Path(directory, "epoch").read_text()) + 1
    for epoch in range(first, config["epochs"]):
        seen = []
        for batch in shard.iter_torch_batches(batch_size=16):
            assert torch.equal(batch["twice"], 2 * batch["x"])
            seen += batch["x"].tolist()
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, seen)
        rows = [each for part in of_ranks for each in part]
        time.sleep(0.2)
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "epoch").write_text(str(epoch))
            is_first = ray.train.get_context().get_world_rank() == 0
            saved = ray.train.Checkpoint(directory) if is_first else None
            facts = {"epoch": epoch, "rows": len(rows), "distinct": len(set(rows)), "whole": whole}
            ray.train.report({**facts, "own": len(seen)}, checkpoint=saved)
"""


def archive(train: str = TRAIN) -> bytes:
    return tar_gz({"train.py": train.encode(), "mapped.py": MAPPED.encode()})


def begun(
    started: list[DrivenRun], cluster: RayCluster, place: Path, train: str = TRAIN
) -> DrivenRun:
    """Both ranks on one node: the other one has a processor for Ray Data."""
    table = pa.table({"x": list(range(ROWS))})
    (place / "rows").mkdir()
    for part in range(4):
        rows = table.slice(part * ROWS // 4, ROWS // 4)
        pq.write_table(rows, place / "rows" / f"{part}.parquet")
    config = {"path": str(place / "rows"), "epochs": EPOCHS}
    code = {"train_fn": "train:train_fn", "datasets": "train:datasets", "config": config}
    scaling = {
        "min_workers": 2,
        "max_workers": 2,
        "resources_per_worker": {"CPU": 0.5},
        "placement_strategy": "PACK",
    }
    return begin(started, cluster, place, archive(train), code, scaling=scaling)


@pytest.mark.parametrize("killed", [0, 1])
def test_ray_data_are_split_over_the_ranks_and_begin_their_epoch_again(
    killed: int, started: list[DrivenRun], cluster: RayCluster, tmp_path: Path
) -> None:
    run = begun(started, cluster, tmp_path)
    run.wait_for_step(4)
    os.kill(run.worker(killed)["pid"], signal.SIGKILL)
    assert run.wait_for_end() == 0, run.describe()
    assert [event.data["verdict"] for event in run.of(EventKind.FAILURE)] == ["worker_lost"]
    points = [
        point["values"] for each in run.of(EventKind.METRICS) for point in each.data["points"]
    ]
    assert {int(each["epoch"]) for each in points} == set(range(EPOCHS))
    for each in points:
        assert (each["rows"], each["distinct"]) == (ROWS, ROWS), "each row once, over both ranks"
        assert (each["own"], each["whole"]) == (ROWS / 2, 10)
    said = {each.data["guarantee"] for each in run.of(EventKind.TRAINING_STARTED)}
    assert all("the epoch begins again" in each for each in said) and said


def test_a_function_that_returns_no_data_sets_is_named(
    started: list[DrivenRun], cluster: RayCluster, tmp_path: Path
) -> None:
    run = begun(started, cluster, tmp_path, TRAIN.replace("return {", "return [] and {"))
    run.wait_for_end()
    assert run.last(EventKind.FINISHED).data["outcome"] == "failed"
    error = run.last(EventKind.FAILURE).data["exception"]
    assert "train:datasets" in error and "return a dict with a ray.data.Dataset" in error
