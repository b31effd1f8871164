"""Uploaded code on a real cluster, killed in the middle: a task loses no step, a Ray Train function
goes on from its checkpoint."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from everstep.code import pack
from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.code import CodeStore
from storage.filesystem import open_storage
from storage.logs.rank_logs import read_rank_logs
from storage.run_control import StackOrder
from tests.integration.driven_run import DrivenRun
from tests.integration.own_code_runs import begin, cluster, started
from tests.integration.ray_cluster import RayCluster
from tests.support.code_archives import tar_gz
from train_fn.ray_train.ray_checkpoints import MANIFEST

__all__ = ["cluster", "started"]

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> bytes:
    return pack(EXAMPLES / name)


def test_a_task_of_ones_own_loses_no_step(
    started: list[DrivenRun], cluster: RayCluster, tmp_path: Path
) -> None:
    code = {"task": "task:DigitsTask", "args": {"width": 32}}
    run = begin(
        started,
        cluster,
        tmp_path,
        example("own_task"),
        code,
        train={"epochs": 40, "global_batch_size": 50},
    )
    run.wait_for_step(200)
    victim = run.worker(1)
    os.kill(victim["pid"], signal.SIGKILL)
    assert run.wait_for_end() == 0, run.describe()
    run.check_sequence()
    assert [
        (event.data["verdict"], event.data["first_rank"]) for event in run.of(EventKind.FAILURE)
    ] == [("worker_lost", 1)]
    assert run.last(EventKind.RECOVERED).data["steps_lost"] == 0
    assert {step for step, _ in run.steps()} == set(range(1, 40 * 30 + 1))
    for epoch in run.of(EventKind.EPOCH_COMPLETED):
        assert (epoch.data["used_once"], epoch.data["duplicates"], epoch.data["missing"]) == (
            1500,
            0,
            0,
        )
    assert run.last(EventKind.EVALUATED).data["metrics"]["val_accuracy"] > 0.8
    assert run.last(EventKind.FINISHED).data["outcome"] == "succeeded"


SHARDED_STEPS = 16
"""Of 1,000 samples in global batches of 64."""


def begin_sharded(
    started: list[DrivenRun],
    cluster: RayCluster,
    tmp_path: Path,
    sharding: str = "full",
    num_ranks: int = 2,
) -> DrivenRun:
    """Two nodes have one processor each."""
    train = {"epochs": 12, "global_batch_size": 64, "sharding": sharding, "grad_clip_norm": 1.0}
    code = {"task": "sharded_gpt:ShardedGpt"}
    archive = example("gallery")
    scaling = {
        "min_workers": num_ranks,
        "max_workers": num_ranks,
        "resources_per_worker": {"CPU": 2 / num_ranks},
    }
    run = begin(started, cluster, tmp_path, archive, code, scaling=scaling, train=train)
    run.wait_for_step(40)
    return run


def require_whole(run: DrivenRun) -> None:
    """No reported step was lost, every sample was used, and the checkpoint is in two pieces."""
    assert run.wait_for_end() == 0, run.describe()
    run.check_sequence()
    assert run.last(EventKind.RECOVERED).data["steps_lost"] == 0
    found = run.last(EventKind.RESTORED).data
    assert found["source"] == "snapshot" and found["step"] >= 40 and not found["rejected"]
    assert {step for step, _ in run.steps()} == set(range(1, 12 * SHARDED_STEPS + 1))
    closed = run.of(EventKind.EPOCH_COMPLETED)
    assert {(each.data["used_once"], each.data["missing"]) for each in closed} == {(1000, 0)}
    newest = CheckpointStore(run.run_dir).list()[-1]
    assert newest.step == 12 * SHARDED_STEPS and len(newest.files) == 3
    CheckpointStore(run.run_dir).verify(newest.name)


@pytest.mark.parametrize("sharding", ["optimizer", "full"])
def test_a_task_whose_model_is_sharded_loses_no_reported_step(
    sharding: str, started: list[DrivenRun], cluster: RayCluster, tmp_path: Path
) -> None:
    run = begin_sharded(started, cluster, tmp_path, sharding)
    os.kill(run.worker(1)["pid"], signal.SIGKILL)
    require_whole(run)
    assert [event.data["verdict"] for event in run.of(EventKind.FAILURE)] == ["worker_lost"]
    assert run.last(EventKind.RECOVERED).data["rung"] == "snapshot"


@pytest.mark.parametrize(("sharding", "num_ranks"), [("full", 2), ("hybrid", 4)])
def test_a_task_whose_model_is_sharded_loses_no_reported_step_with_a_node(
    sharding: str,
    num_ranks: int,
    started: list[DrivenRun],
    cluster: RayCluster,
    tmp_path: Path,
) -> None:
    """A new node takes the dead one's place; the pieces that it had come from the other one."""
    run = begin_sharded(started, cluster, tmp_path, sharding, num_ranks)
    cluster.kill_node(run.worker(1)["node_id"])
    new = cluster.add_node()
    require_whole(run)
    assert new in {run.worker(rank)["node_id"] for rank in range(num_ranks)}


def test_a_train_fn_goes_on_from_its_own_checkpoint(
    started: list[DrivenRun], cluster: RayCluster, tmp_path: Path
) -> None:
    code = {"train_fn": "train:train_fn", "config": {"epochs": 60}}
    run = begin(started, cluster, tmp_path, example("own_train_fn"), code)
    run.wait_for_step(10)
    os.kill(run.worker(1)["pid"], signal.SIGKILL)
    assert run.wait_for_end() == 0, run.describe()
    run.check_sequence()
    assert [event.data["verdict"] for event in run.of(EventKind.FAILURE)] == ["worker_lost"]
    first, second = (event.data for event in run.of(EventKind.RESTORED))
    assert (first["source"], first["step"], second["source"]) == ("fresh", 0, "checkpoint")
    assert 9 <= second["step"] <= 60
    recovered = run.last(EventKind.RECOVERED).data
    assert recovered["unit"] == "reports" and 0 <= recovered["since_report_s"] < 120
    epochs = {
        point["step"]: point["values"]["epoch"]
        for event in run.of(EventKind.METRICS)
        for point in event.data["points"]
    }
    assert epochs == {step: step - 1 for step in range(1, 61)}
    lines, _ = read_rank_logs(run.run_dir)
    assert any(
        line.attempt == 2 and line.message == f"going on with epoch {second['step']}"
        for line in lines
    )
    assert not any("Reporting training result" in line.message for line in lines)
    assert run.last(EventKind.FINISHED).data["outcome"] == "succeeded"


def test_sharded_training_goes_on_from_every_rank_s_part(
    started: list[DrivenRun], cluster: RayCluster, tmp_path: Path
) -> None:
    """FSDP: no rank has the whole state, and a checkpoint is whole once all ranks' parts are
    there."""
    run = begin(
        started,
        cluster,
        tmp_path,
        example("own_train_fn_fsdp"),
        {"train_fn": "train:train_fn", "config": {"epochs": 40}},
    )
    run.wait_for_step(10)
    os.kill(run.worker(0)["pid"], signal.SIGKILL)
    assert run.wait_for_end() == 0, run.describe()
    assert [event.data["verdict"] for event in run.of(EventKind.FAILURE)] == ["worker_lost"]
    second = run.of(EventKind.RESTORED)[1].data
    assert second["source"] == "checkpoint" and 9 <= second["step"] <= 40
    lines, _ = read_rank_logs(run.run_dir)
    assert any(
        line.attempt == 2 and line.message == f"going on with epoch {second['step']}"
        for line in lines
    )
    losses = {
        point["step"]: point["values"]["loss"]
        for event in run.of(EventKind.METRICS)
        for point in event.data["points"]
    }
    assert set(losses) == set(range(1, 41)) and losses[40] < 0.5 * losses[1]
    manifests = [
        json.loads(path.read_text())
        for path in tmp_path.glob(f"runs/{run.run_dir.run_id}/checkpoint_*/{MANIFEST}")
    ]
    assert manifests and all(manifest["world_size"] == 2 for manifest in manifests)
    for manifest in manifests:
        assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} <= manifest["files"].keys()


def test_a_train_fn_is_paused_at_a_report_and_goes_on(
    started: list[DrivenRun], cluster: RayCluster, tmp_path: Path
) -> None:
    run = begin(
        started,
        cluster,
        tmp_path,
        example("own_train_fn"),
        {"train_fn": "train:train_fn", "config": {"epochs": 5000}},
    )
    run.wait_for_step(5)
    run.run_dir.request_stop(1, "pause")
    assert run.wait_for_end() == 0, run.describe()
    paused_at = max(step for step, _ in run.steps())
    assert run.last(EventKind.FINISHED).data["reason"]["code"] == "paused_by_user"
    run.events.clear()
    run.start(submission=2)
    run.wait_for_step(paused_at + 1)
    assert run.last(EventKind.RESTORED).data["step"] == paused_at
    run.run_dir.request_stop(2, "cancel")
    assert run.wait_for_end() == 0, run.describe()
    assert run.last(EventKind.FINISHED).data["reason"]["code"] == "cancelled_by_user"


ONE_SIDED = """
import ray.train
import torch
import torch.distributed as dist


def train_fn(config):
    while True:
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 0:
            ray.train.report({"loss": 1.0})
"""


def test_a_function_of_which_one_rank_reports_says_what_its_ranks_wait_for(
    started: list[DrivenRun], cluster: RayCluster, tmp_path: Path
) -> None:
    digest = CodeStore(open_storage(str(tmp_path))).put(tar_gz({"train.py": ONE_SIDED})).digest
    code = {"archive": digest, "train_fn": "train:train_fn"}
    scaling = {"min_workers": 2, "max_workers": 2}
    run = DrivenRun(
        cluster, tmp_path, RunSpec.model_validate({"name": "o", "code": code, "scaling": scaling})
    )
    started.append(run)
    run.start(EVERSTEP_RECOVERY_STACKS_AFTER_S="3")
    run.wait_for(lambda: run.of(EventKind.STACKS), "the ranks' stacks")
    data = run.last(EventKind.STACKS).data
    assert data["id"] is None and data["quiet_s"] >= 3
    assert "rank 0 waits in ray.train.report (train.py, line 11)" in data["summary"]
    assert "rank 1 waits in a collective (train.py, line 9)" in data["summary"]
    assert "All ranks must call ray.train.report" in data["summary"]
    run.run_dir.order_stacks(1, StackOrder("stk_1", attempt=1))
    run.wait_for(
        lambda: any(event.data["id"] == "stk_1" for event in run.of(EventKind.STACKS)), "an answer"
    )


# ---------------------------------------------------------------- Ray Data

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


def begin_ray_data(
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
    archive = tar_gz({"train.py": train, "mapped.py": MAPPED})
    return begin(started, cluster, place, archive, code, scaling=scaling)


@pytest.mark.parametrize("killed", [0, 1])
def test_ray_data_are_split_over_the_ranks_and_begin_their_epoch_again(
    killed: int, started: list[DrivenRun], cluster: RayCluster, tmp_path: Path
) -> None:
    run = begin_ray_data(started, cluster, tmp_path)
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
    run = begin_ray_data(started, cluster, tmp_path, TRAIN.replace("return {", "return [] and {"))
    run.wait_for_end()
    assert run.last(EventKind.FINISHED).data["outcome"] == "failed"
    error = run.last(EventKind.FAILURE).data["exception"]
    assert "train:datasets" in error and "return a dict with a ray.data.Dataset" in error
