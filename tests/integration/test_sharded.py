"""A loop of one's own whose model FSDP2 shards: ranks and nodes are killed at every place of a
step, and no reported step is lost. At the same number of ranks, all bits are those of a twin that
nobody killed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from tests.support.own_loops import Ended, LoopJob, events, losses, start, train_to_end
from tests.support.rank_processes import run_id_for
from train_fn.checkpoints.sharded import main
from train_fn.node.node_dir import shared_memory_root
from train_fn.standalone.rank import EXIT_STOPPED

NODES = ("a", "b", "b")
STEPS = 14


def job_of(tmp_path: Path, name: str, **changes: Any) -> LoopJob:
    settings: dict[str, Any] = {"nodes": NODES, "world_size": len(NODES), "steps": STEPS}
    return LoopJob(tmp_path, run_id_for(tmp_path, name), loop="sharded", **{**settings, **changes})


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoopJob, Ended]:
    job = job_of(tmp_path_factory.mktemp("twin"), "whole")
    return job, train_to_end(job)


def places(job: LoopJob, node: str) -> list[Path]:
    """Return the directories of a node's snapshots."""
    return list((shared_memory_root() / job.run_id).glob(f"{node}.*"))


def lose(job: LoopJob, *nodes: str) -> None:
    """Let nodes be gone, with what they held in memory."""
    for node in nodes:
        for place in places(job, node):
            shutil.rmtree(place)


def newest_reported(job: LoopJob) -> int:
    return max(losses(job), default=0)


def restored(job: LoopJob) -> dict[str, Any]:
    return events(job, EventKind.RESTORED)[-1]


def require_like(job: LoopJob, ended: Ended, twin: tuple[LoopJob, Ended]) -> None:
    assert ended.weights == twin[1].weights
    assert losses(job) == losses(twin[0])
    assert {*losses(job)} == {*range(1, STEPS + 1)}


@pytest.mark.parametrize(
    ("rank", "place"),
    [
        pytest.param(0, "forward", marks=pytest.mark.chaos),
        pytest.param(2, "backward", marks=pytest.mark.chaos),
        (0, "gate"),
        pytest.param(1, "torn", marks=pytest.mark.chaos),
        (2, "committed"),
        (1, "copying"),
    ],
)
def test_a_killed_rank_or_node_costs_no_reported_step(
    rank: int, place: str, tmp_path: Path, twin: tuple[LoopJob, Ended]
) -> None:
    """The other rank of its node dies with it, and the node's memory is gone."""
    mates = tuple(at for at, node in enumerate(NODES) if node == NODES[rank] and at != rank)
    job = job_of(tmp_path, "broken", killed=(rank, 6, place), mates=mates)
    first = start(job)
    assert [each.exit_code for at, each in enumerate(first) if at in (rank, *mates)] == [-9] * (
        1 + len(mates)
    )
    reported = newest_reported(job)
    lose(job, NODES[rank])
    nodes = tuple("new" if node == NODES[rank] else node for node in NODES)
    ended = train_to_end(replace(job, killed=None, mates=(), nodes=nodes))
    found = restored(job)
    assert found["source"] == "snapshot" and found["rejected"] == []
    assert reported <= found["step"] and 5 <= found["step"] <= 7
    require_like(job, ended, twin)


def test_two_deaths_and_other_sizes(tmp_path: Path, twin: tuple[LoopJob, Ended]) -> None:
    """4 ranks on 2 nodes, then 2 on one, then 3 on 2, all without a checkpoint."""
    job = job_of(tmp_path, "sizes", nodes=("a", "a", "b", "b"), world_size=4)
    start(replace(job, killed=(3, 4, "backward"), mates=(2,)))
    lose(job, "b")
    start(replace(job, nodes=("a", "a"), world_size=2, killed=(1, 8, "torn")))
    assert restored(job)["source"] == "snapshot" and restored(job)["step"] in (3, 4)
    ended = train_to_end(replace(job, nodes=("a", "c", "c"), world_size=3))
    assert (restored(job)["source"], restored(job)["step"]) == ("snapshot", 8)
    for name, value in twin[1].values.items():
        np.testing.assert_allclose(ended.values[name], value, rtol=1e-4, atol=1e-5)
    assert {*losses(job)} == {*range(1, STEPS + 1)}


@pytest.mark.chaos
def test_a_second_death_before_the_first_gate_costs_nothing(
    tmp_path: Path, twin: tuple[LoopJob, Ended]
) -> None:
    """What the first death left stays until the new group holds the same."""
    job = job_of(tmp_path, "twice")
    start(replace(job, killed=(2, 6, "gate"), mates=(1,)))
    lose(job, "b")
    start(replace(job, nodes=("a", "c", "c"), killed=(1, 6, "forward"), mates=(2,)))
    assert restored(job)["step"] == 6
    lose(job, "c")
    ended = train_to_end(replace(job, nodes=("a", "d", "e")))
    assert (restored(job)["source"], restored(job)["step"]) == ("snapshot", 6)
    require_like(job, ended, twin)


@pytest.mark.chaos
def test_a_stop_saves_all_pieces_and_the_run_goes_on(
    tmp_path: Path, twin: tuple[LoopJob, Ended]
) -> None:
    job = job_of(tmp_path, "stopped")
    ended = start(replace(job, odd=(1, 5, "stop")))
    assert [each.exit_code for each in ended] == [EXIT_STOPPED] * len(NODES)
    [manifest] = CheckpointStore(job.run_dir).list()
    lose(job, "a", "b")
    require_like(job, train_to_end(job), twin)
    assert (restored(job)["source"], restored(job)["step"]) == ("checkpoint", manifest.step)


def test_a_damaged_piece_is_named_and_its_copy_taken(
    tmp_path: Path, twin: tuple[LoopJob, Ended]
) -> None:
    job = job_of(tmp_path, "damaged")
    start(replace(job, killed=(1, 6, "gate")))
    [own] = [path for place in places(job, "a") for path in place.glob("*-000000006-r0.pt")]
    data = bytearray(own.read_bytes())
    data[-100] ^= 1
    own.write_bytes(bytes(data))
    ended = train_to_end(job)
    found = restored(job)
    assert (found["source"], found["step"]) == ("snapshot", 6)
    [rejected] = found["rejected"]
    assert rejected["name"].startswith("piece 0 of 3 of the snapshot of step 6")
    assert rejected["name"].endswith("on node a") and "digest" in rejected["problem"]
    require_like(job, ended, twin)


def test_checkpoints_are_whole_in_pieces_at_any_size(
    tmp_path: Path, twin: tuple[LoopJob, Ended]
) -> None:
    """All nodes are lost, and a piece of the newest checkpoint is damaged: it is named, and the
    older one counts, at another number of ranks."""
    job = job_of(tmp_path, "durable", every_steps=3)
    start(replace(job, killed=(0, 11, "backward")))
    store = CheckpointStore(job.run_dir)
    older, newest = store.list()[-2:]
    assert [len(each.files) for each in (older, newest)] == [1 + len(NODES)] * 2
    lose(job, "a", "b")
    piece = sorted(newest.files)[1]
    path = Path(str(job.run_dir.local_path)) / "checkpoints" / newest.name / piece
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    ended = train_to_end(replace(job, nodes=("c", "d"), world_size=2))
    found = restored(job)
    assert (found["source"], found["step"]) == ("checkpoint", older.step)
    [rejected] = found["rejected"]
    assert rejected["name"] == newest.name and piece in rejected["problem"]
    for name, value in twin[1].values.items():
        np.testing.assert_allclose(ended.values[name], value, rtol=1e-4, atol=1e-5)
    assert store.list()[-1].step == STEPS


def test_what_is_left_of_a_run_without_a_service_becomes_a_checkpoint(
    tmp_path: Path, twin: tuple[LoopJob, Ended]
) -> None:
    """Rank 0 commits the pieces that lie on its node, and joins read them."""
    job = job_of(tmp_path, "left", nodes=("a", "a", "a"))
    start(replace(job, killed=(1, 6, "gate")))
    [manifest] = CheckpointStore(job.run_dir).list()
    assert (manifest.step, manifest.world_size, len(manifest.files)) == (6, 3, 4)
    lose(job, "a")
    ended = train_to_end(job)
    assert (restored(job)["source"], restored(job)["step"]) == ("checkpoint", 6)
    require_like(job, ended, twin)
    newest = CheckpointStore(job.run_dir).list()[-1]
    directory = Path(str(job.run_dir.local_path)) / "checkpoints" / newest.name
    assert main([str(directory)]) == 0
    found = load_file(directory / "model.safetensors")
    assert {*found} == {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}
    for name, value in found.items():
        np.testing.assert_array_equal(value.numpy(), ended.values[name.replace(".", "_")])
