"""A loop of one's own whose model FSDP2 shards: ranks and nodes are killed at every place of a
step, and no reported step is lost. At the same number of ranks, all bits are those of a twin that
nobody killed."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from tests.support.own_loops import Ended, LoopJob, events, losses, start, train_to_end
from tests.support.rank_processes import end_stopped, plan_of, run_id_for, wait_until_stopped
from tests.support.two_groups import only_in_chaos
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
    ("heirs", "lost", "source", "steps"),
    [
        (4, "b", "snapshot", [4]),
        *only_in_chaos(
            (4, None, "snapshot", [6, 7]),
            (False, None, "snapshot", [6, 7]),
            (False, "b", "fresh", [0]),
        ),
    ],
)
def test_copies_that_travel_seldom_or_never(
    heirs: bool | int,
    lost: str | None,
    source: str,
    steps: list[int],
    tmp_path: Path,
    twin: tuple[LoopJob, Ended],
) -> None:
    """All processes die at step 8, and without the memory of a node the steps since the newest
    copies are made again."""
    job = job_of(tmp_path, "seldom", heirs=heirs, killed=(2, 7, "backward"), mates=(0, 1))
    start(job)
    begun = {each["snapshots"] for each in events(job, EventKind.TRAINING_STARTED)}
    assert begun == {"every_n" if heirs else "own_node"}
    if lost is not None:
        lose(job, lost)
    nodes = tuple("new" if node == lost else node for node in NODES)
    ended = train_to_end(replace(job, killed=None, mates=(), nodes=nodes))
    assert restored(job)["source"] == source and restored(job)["step"] in steps
    require_like(job, ended, twin)


def test_a_step_that_passed_no_gate_is_not_reported(
    tmp_path: Path, twin: tuple[LoopJob, Ended]
) -> None:
    """A rank is killed while its piece is on its own node alone. The run goes on from there, and
    that node dies before the piece is anywhere else: the step is made again."""
    job = job_of(tmp_path, "gateless")
    start(replace(job, killed=(1, 6, "copying")))
    start(replace(job, killed=(1, 0, "copying"), mates=(2,)))
    assert restored(job)["step"] == 6 and newest_reported(job) <= 5
    lose(job, "b")
    require_like(job, train_to_end(replace(job, nodes=("a", "c", "c"))), twin)
    assert restored(job)["step"] == 5


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


def test_a_loop_may_begin_from_what_another_trainer_saved(tmp_path: Path) -> None:
    """A plain directory of torch.distributed.checkpoint, loaded before `with state:`, at another
    number of ranks. What was loaded is part of what deaths cannot take."""
    plain = tmp_path / "plain"
    train_to_end(job_of(tmp_path, "first", nodes=("a", "b"), world_size=2, steps=6, plain=plain))
    whole = job_of(tmp_path, "whole", steps=6, plain=plain)
    ended = train_to_end(whole)
    job = job_of(tmp_path, "killed", steps=6, plain=plain)
    start(replace(job, killed=(1, 1, "gate")))
    assert train_to_end(job).weights == ended.weights and losses(job) == losses(whole)
    assert restored(job)["source"] == "snapshot"
    assert losses(job)[1] < losses(job_of(tmp_path, "first"))[1]


@pytest.mark.parametrize(
    ("nodes", "mates", "place"),
    [
        pytest.param("aabb", (3,), "torn", marks=pytest.mark.chaos),
        pytest.param("aabb", (3,), "committed", marks=pytest.mark.chaos),
        pytest.param("aabb", (3,), "gate", marks=pytest.mark.chaos),
        pytest.param("abab", (0,), "copying", marks=pytest.mark.chaos),
        pytest.param("abac", (), "backward", marks=pytest.mark.chaos),
    ],
)
def test_replicas_keep_each_other_s_pieces(
    nodes: str, mates: tuple[int, ...], place: str, tmp_path: Path
) -> None:
    """A node of two sharded replicas dies. What no other node holds was sent there. Then another
    run goes on with one replica."""
    job = job_of(tmp_path, "hybrid", nodes=tuple(nodes), world_size=4, replicas=2)
    whole = replace(job, run_id=run_id_for(tmp_path, "whole"))
    ended = train_to_end(whole)
    start(replace(job, killed=(2, 5, place), mates=mates))
    reported = newest_reported(job)
    lose(job, nodes[2])
    names = tuple("new" if node == nodes[2] else node for node in nodes)
    start(replace(job, nodes=names, killed=(1, 9, "gate")))
    assert restored(job)["source"] == "snapshot" and restored(job)["step"] >= max(reported, 4)
    once_more = replace(job, run_id=job.run_id, nodes=names)
    again = train_to_end(once_more)
    assert again.weights == ended.weights and losses(job) == losses(whole)
    fork = replace(job, run_id=run_id_for(tmp_path, "fork"), origin=job.run_id, steps=STEPS + 2)
    train_to_end(replace(fork, nodes=("a", "b"), world_size=2, replicas=1))
    assert restored(fork)["source"] == "fork" and {*losses(fork)} == {STEPS + 1, STEPS + 2}


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("skip", "the loop called other modules of the sharded model, .* on rank 1 than on rank 0"),
        ("gather", "on rank 1 than on rank 0 since step 2: torch mixes"),
        ("another", "on rank 1 than on rank 0 since step 2: torch mixes"),
        (
            "alone",
            "the loop calls the sharded model, .* rank 0, while rank 1 does something else",
        ),
        ("looking", "gathers a weight of it, on rank 0, while rank 1 has returned. .* on all"),
        ("drop", "on rank 1 than on rank 0 since step 2: torch mixes"),
        ("rate", "options or step counts of the optimizer of rank 1 differ .* after step 3"),
        ("unsummed", r"step 3 while gradients of a sharded model wait to be summed .* Call model"),
        ("partial", r"step 3 while gradients of a sharded model wait to be summed .* all layers"),
    ],
)
def test_ranks_that_do_not_do_the_same_are_refused(what: str, message: str, tmp_path: Path) -> None:
    """With torch alone all of these train on, with other weights than anyone meant, or wait. What
    one rank does alone is named in the first two steps of an attempt."""
    at = {"alone": 1, "looking": 0}.get(what, 2)
    job = job_of(tmp_path, "unlike", nodes=("a", "a"), world_size=2, steps=5, odd=(1, at, what))
    if what == "partial":
        job = replace(job, nodes=("a", "a", "b", "b"), world_size=4, replicas=2)
    ended = start(replace(job, loop="unlike"))
    assert all(re.search(message, str(each.error)) for each in ended), ended
    assert newest_reported(job) == (2 if at == 2 else 0)


# ---------------------------------------------------------------- full memory, late ranks


def test_a_full_memory_costs_protection_and_no_bit(
    tmp_path: Path, twin: tuple[LoopJob, Ended]
) -> None:
    """Neither its own piece nor its ward's fits for three steps. The run says so, and trains on;
    once they fit again, a node's death costs nothing."""
    job = job_of(tmp_path, "full", nodes=("a", "b", "c"))
    start(replace(job, odd=(2, 3, "full"), killed=(1, 9, "torn")))
    without, kept = events(job, EventKind.SNAPSHOTS)
    assert (without["snapshots"], kept["snapshots"]) == ("none", "survivors")
    assert 3 < without["step"] < kept["step"] < 9 and "rank" in without["problem"]
    reported = newest_reported(job)
    lose(job, "b")
    ended = train_to_end(replace(job, nodes=("a", "d", "c")))
    assert restored(job)["source"] == "snapshot" and restored(job)["step"] >= reported >= 8
    require_like(job, ended, twin)


@pytest.mark.chaos
@pytest.mark.parametrize("late", [(2,), (0, 1, 2)])
def test_what_a_late_attempt_leaves_counts_for_nothing(
    late: tuple[int, ...], tmp_path: Path, twin: tuple[LoopJob, Ended]
) -> None:
    """Ranks are stopped, and the run goes on without them from what lies on their nodes. Then they
    wake up, and all together train on, keep newer pieces and save newer checkpoints."""
    job = job_of(tmp_path, "late", every_steps=3)
    first, *mates = late

    def replaced(ranks: list[Any]) -> None:
        wait_until_stopped([ranks[at] for at in late])
        for at in {*range(len(ranks))} - {*late}:
            ranks[at].kill()
        start(replace(job, killed=(1, 7, "torn")))
        for at in late:
            os.kill(ranks[at].pid, signal.SIGCONT)

    start(
        replace(job, killed=(first, 5, "backward"), mates=tuple(mates), by=signal.SIGSTOP), replaced
    )
    saved = {(each.submission, each.step) for each in CheckpointStore(job.run_dir).list()}
    assert (len(late) == len(NODES)) == ((1, STEPS) in saved)
    ended = train_to_end(job)
    assert restored(job)["step"] in (7, 8)
    assert ".s002." in (restored(job)["checkpoint"] or ".s002."), "of the second attempt"
    require_like(job, ended, twin)
    newest = CheckpointStore(job.run_dir).lineage()[-1]
    assert (newest.submission, newest.step) == (3, STEPS)


# ---------------------------------------------------------------- random plans


@cache
def twin_of(directory: Path, size: int) -> tuple[LoopJob, Ended]:
    job = job_of(directory, f"of-{size}", nodes=("a",) * size, world_size=size)
    return job, train_to_end(job)


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("twins")
    twin_of.cache_clear()


@pytest.mark.parametrize(
    ("seed", "heirs"),
    [
        *only_in_chaos(
            *((seed, 1) for seed in range(101) if seed != 10),
            *((seed, 3) for seed in range(0, 40, 2)),
        ),
        (10, 1),
        (101, 1),
    ],
)
def test_deaths_at_random_cost_no_reported_step(
    seed: int, heirs: int, tmp_path: Path, twins: Path
) -> None:
    """With copies after every third step, two reported steps at most are made again for a node. At
    another number of ranks they would have other bits, so that these plans keep it."""
    deaths, nodes = plan_of(seed)
    job, may_cost = job_of(tmp_path, "plan", heirs=heirs), 0
    for number, death in enumerate(deaths):
        where = death.ranks[0], death.from_step, death.place
        by = signal.SIGSTOP if death.is_stopped else signal.SIGKILL
        job = replace(job, nodes=death.nodes, world_size=len(death.nodes))
        reported, earlier = newest_reported(job), events(job, EventKind.RESTORED)
        ended = start(
            replace(job, killed=where, mates=death.ranks[1:], by=by),
            lambda ranks, death=death: end_stopped(death, ranks),
        )
        assert {ended[at].exit_code for at in death.ranks} == {-9}, (death, ended)
        if number and len(events(job, EventKind.RESTORED)) > len(earlier):
            found = restored(job)
            assert found["source"] == "snapshot", found
            assert found["step"] >= reported - may_cost, (death, found)
            assert not found["rejected"], found
        if death.lost is not None:
            lose(job, death.lost)
            may_cost += heirs - 1
    reported = newest_reported(job)
    job = replace(job, nodes=nodes, world_size=len(nodes))
    ended = train_to_end(job)
    assert restored(job)["source"] == "snapshot" and restored(job)["step"] >= reported - may_cost
    whole = twin_of(twins, len(nodes))
    if len({len(nodes), *(len(death.nodes) for death in deaths)}) == 1:
        require_like(job, ended, whole)
        return
    assert {*losses(job)} == {*range(1, STEPS + 1)}
    for name, value in whole[1].values.items():
        np.testing.assert_allclose(ended.values[name], value, rtol=1e-4, atol=1e-5)
