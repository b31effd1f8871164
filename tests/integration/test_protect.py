"""A loop of one's own, protected: a rank is killed at every place of a step, and nothing is lost;
losses and final weights are those of a twin that nobody killed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from tests.support.own_loops import (
    Ended,
    LoopJob,
    events,
    losses,
    start,
    train_to_end,
)
from tests.support.rank_processes import run_id_for
from tests.support.two_groups import only_in_chaos
from train_fn.node.node_dir import shared_memory_root
from train_fn.snapshots.store import Label, labels_in


def job_of(tmp_path: Path, name: str, **changes: object) -> LoopJob:
    return LoopJob(tmp_path, run_id_for(tmp_path, name), **changes)  # type: ignore[arg-type]


def labels(job: LoopJob) -> list[Label]:
    root = shared_memory_root() / job.run_id
    return [label for place in sorted(root.glob("*")) for label in labels_in(place)]


def killed_and_resumed(
    tmp_path: Path, loop: str, killed: tuple[int, int, str]
) -> tuple[LoopJob, Ended, int]:
    """Kill a rank, and start again. Return the run, its end, and the step where it went on."""
    job = job_of(tmp_path, "broken", loop=loop)
    first = start(LoopJob(job.directory, job.run_id, loop=loop, killed=killed))
    assert first[killed[0]].exit_code == -9
    assert first[1 - killed[0]].error is not None
    ended = train_to_end(job)
    restored = events(job, EventKind.RESTORED)
    assert [each["source"] == "fresh" for each in restored] == [True, False]
    assert restored[1]["rejected"] == []
    return job, ended, restored[1]["step"]


@pytest.mark.parametrize(
    ("place", "kept", "rank"),
    [
        ("backward", 0, 0),
        ("torn", 1, 1),
        ("committed", 1, 0),
        *only_in_chaos(
            *(("forward", 0, rank) for rank in (0, 1)),
            *(("backward", 0, 1), ("torn", 1, 0), ("committed", 1, 1)),
        ),
    ],
)
def test_a_killed_rank_costs_no_step(place: str, kept: int, rank: int, tmp_path: Path) -> None:
    """``kept``: whether its peer commits the step in which the rank dies. After the backward pass
    it cannot, where the model has buffers that the ranks share before their optimizers step."""
    twin = job_of(tmp_path, "whole")
    whole = train_to_end(twin)
    job, ended, step = killed_and_resumed(tmp_path, "raw", (rank, 21, place))
    assert step == 21 + kept
    assert ended.weights == whole.weights
    found, expected = losses(job), losses(twin)
    assert set(found) == set(expected) == set(range(1, 41))
    if rank == 0:  # of the step that it may have had no time to tell, there is rank 1's own loss
        del found[step], expected[step]
    assert found == expected


@pytest.mark.parametrize("has_sampler", [False, True])
def test_what_one_rank_does_at_an_epoch_s_end_is_done_though_it_dies_there(
    has_sampler: bool, tmp_path: Path
) -> None:
    """Its peer has nothing to do there, and waits for it before it begins the next epoch."""

    def notes(job: LoopJob) -> list[str]:
        return (tmp_path / f"{job.run_id}.evaluated").read_text().splitlines()

    twin = job_of(tmp_path, "whole", loop="evaluated", norm=has_sampler)
    job = job_of(tmp_path, "broken", loop="evaluated", norm=has_sampler)
    whole = train_to_end(twin)
    for epoch in (1, 3):
        start(replace(job, killed=(0, epoch, "evaluation")))
        assert len(dict.fromkeys(notes(job))) == epoch
    ended = train_to_end(job)
    assert ended.weights == whole.weights
    assert [*dict.fromkeys(notes(job))] == notes(twin) and len(notes(twin)) == 4
    length = 5 if has_sampler else 9
    begun = [each["step"] for each in events(job, EventKind.RESTORED)]
    assert begun[0] == 0 < begun[1] < 2 * length and begun[1] < begun[2] < 4 * length


@pytest.mark.parametrize("world_size", [1, 2])
def test_folds_of_one_script_go_on_where_they_were(world_size: int, tmp_path: Path) -> None:
    """A rank is killed in the second one."""
    twin = job_of(tmp_path, "whole", loop="folds", world_size=world_size)
    job = job_of(tmp_path, "broken", loop="folds", world_size=world_size)
    whole = train_to_end(twin)
    start(replace(job, killed=(world_size - 1, 11, "fold 1")))
    ended = train_to_end(job)
    assert ended.weights == whole.weights
    begun = [
        [each["step"] for each in events(replace(job, run_id=name), EventKind.RESTORED)]
        for name in (job.run_id, f"{job.run_id}.2", f"{job.run_id}.3")
    ]
    assert begun[0] == [0, 18] and begun[2] == [0]
    assert begun[1][0] == 0 and 0 < begun[1][1] <= 11


@pytest.mark.parametrize("rank", [0, *only_in_chaos(1)])
def test_an_epoch_is_closed_though_a_rank_died_when_it_ended(rank: int, tmp_path: Path) -> None:
    """Its peer has made the last step of the second epoch, and makes it again: what follows it on
    the other rank was not done."""
    twin = job_of(tmp_path, "whole")
    whole = train_to_end(twin)
    job, ended, step = killed_and_resumed(tmp_path, "raw", (rank, 17, "torn"))
    assert 0 < step < 18
    assert ended.weights == whole.weights
    closed: dict[int, dict[str, object]] = {}
    for facts in events(job, EventKind.EPOCH_COMPLETED):  # a restart reports the newest ones again
        untimed = {**facts, "seconds": None}
        assert closed.setdefault(facts["epoch"], untimed) == untimed
    expected = [{**each, "seconds": None} for each in events(twin, EventKind.EPOCH_COMPLETED)]
    assert list(closed.values()) == expected and len(expected) == 4


@pytest.mark.parametrize(
    ("place", "kept"),
    [
        ("between", 0),
        *only_in_chaos(("backward", 0), ("torn", 0)),
    ],
)
def test_two_optimizers_lose_no_step(place: str, kept: int, tmp_path: Path) -> None:
    twin = job_of(tmp_path, "whole", loop="gan")
    whole = train_to_end(twin)
    job, ended, step = killed_and_resumed(tmp_path, "gan", (1, 21, place))
    assert step == 21 + kept
    assert ended.weights == whole.weights
    assert losses(job) == losses(twin)


def test_it_grows_and_shrinks_on_the_same_global_batches(tmp_path: Path) -> None:
    twin = job_of(tmp_path, "whole", norm=False)
    whole = train_to_end(twin)
    job = job_of(tmp_path, "parts", norm=False)
    for world_size, step in ((2, 9), (3, 18), (1, 27)):
        place = (world_size - 1, step, "forward")
        start(LoopJob(tmp_path, job.run_id, world_size, norm=False, killed=place))
    ended = train_to_end(job)
    steps = [each["step"] for each in events(job, EventKind.RESTORED)]
    assert steps[:3] == [0, 9, 18] and 18 < steps[3] <= 27
    for name, value in whole.values.items():
        np.testing.assert_allclose(ended.values[name], value, rtol=1e-4, atol=1e-5)
    epochs = {each["epoch"]: each for each in events(job, EventKind.EPOCH_COMPLETED)}
    alone = {each["epoch"]: each for each in events(twin, EventKind.EPOCH_COMPLETED)}
    assert set(epochs) == set(alone) == {0, 1, 2, 3}
    for epoch, facts in epochs.items():
        assert (facts["used_once"], facts["duplicates"], facts["missing"]) == (200, 0, 0)
        assert facts["digest"] == alone[epoch]["digest"]


@pytest.mark.parametrize("what", ["update", "commit"])
def test_ranks_that_differ_are_stopped_before_anything_of_the_step_is_kept(
    what: str, tmp_path: Path
) -> None:
    job = job_of(tmp_path, "odd", loop="own", odd=(1, 10, what), every_steps=1)
    ended = start(job)
    assert [each.exit_code for each in ended] == [0, 0]
    assert any("StepNotWhole" in str(each.error) for each in ended), ended
    assert all(each.error for each in ended)
    most = 10 if what == "update" else 11
    assert [label for label in labels(job) if label.problem is None and label.step > most] == []
    assert all(manifest.step <= most for manifest in CheckpointStore(job.run_dir).list())


def test_a_step_unlike_the_others_is_not_left_when_its_peer_is_silent(tmp_path: Path) -> None:
    """Rank 0 makes two optimizer steps instead of one, and rank 1 dies before it could object."""
    job = job_of(tmp_path, "odd", loop="own", odd=(0, 10, "update"), killed=(1, 10, "torn"))
    ended = start(job)
    assert ended[1].exit_code == -9 and ended[0].error
    assert all(label.step <= 10 for label in labels(job) if label.problem is None)
    assert any("2 optimizer steps instead of 1" in str(label.problem) for label in labels(job)) or (
        not [label for label in labels(job) if label.step == 11]
    )


def test_a_run_stops_at_a_signal_and_goes_on(tmp_path: Path) -> None:
    twin = job_of(tmp_path, "whole")
    whole = train_to_end(twin)
    job = job_of(tmp_path, "paused")
    stopped = start(LoopJob(tmp_path, job.run_id, odd=(0, 12, "stop")))
    assert [each.exit_code for each in stopped] == [75, 75]
    [manifest] = CheckpointStore(job.run_dir).list()
    assert manifest.step in (13, 14, 15)
    assert train_to_end(job).weights == whole.weights
    assert [each["step"] for each in events(job, EventKind.RESTORED)] == [0, manifest.step]
