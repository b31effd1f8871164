"""The driver on a real cluster of one-CPU nodes: the way to the end, and what is killed on that
way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from everstep.spec.run_spec import RunSpec
from everstep.spec.sections import RecoverySpec
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.logs.journal import read_journal
from tests.integration.driven_run import DrivenRun, spec
from tests.integration.ray_cluster import RayCluster
from tests.support.small_disk import mounted_small_disk
from tests.support.two_groups import only_in_chaos
from train_fn.node.node_dir import shared_memory_root

pytestmark = pytest.mark.timeout(600)

Begin = Callable[..., DrivenRun]


@pytest.fixture
def cluster(two_nodes: RayCluster) -> RayCluster:
    return two_nodes


@pytest.fixture
def begin(cluster: RayCluster, tmp_path: Path) -> Iterator[Begin]:
    """Start the driver of a run, ended with the test."""
    runs = []

    def start(run_spec: RunSpec, *, small: bool = False, **env: str) -> DrivenRun:
        run = DrivenRun(cluster, tmp_path, run_spec, small=small)
        runs.append(run)
        run.start(**env)
        return run

    yield start
    for run in runs:
        run.stop()


def small_spec(
    steps: int, step_ms: int = 25, workers: tuple[int, int] = (1, 2), **tags: str
) -> RunSpec:
    """For the small training function."""
    return spec(workers=workers, tags={"steps": str(steps), "step_ms": str(step_ms), **tags})


def check_lossless(run: DrivenRun, total_steps: int) -> None:
    """Every step was reported, and none was lost or taken back by a recovery."""
    assert {step for step, _ in run.steps()} == set(range(1, total_steps + 1))
    assert [event.data["steps_lost"] for event in run.of(EventKind.RECOVERED)] == [0] * len(
        run.of(EventKind.FAILURE)
    )
    for epoch in run.of(EventKind.EPOCH_COMPLETED):
        assert (epoch.data["duplicates"], epoch.data["missing"]) == (0, 0)
        assert epoch.data["used_once"] == epoch.data["samples"]


def test_a_killed_node_costs_no_step_and_a_new_one_is_grown_onto(
    begin: Begin, cluster: RayCluster
) -> None:
    run = begin(spec(train={"epochs": 5000, "global_batch_size": 64}))
    run.wait_for_step(30)
    lost = run.worker(1)["node_id"]
    cluster.kill_node(lost)
    run.wait_for(lambda: run.of(EventKind.RECOVERED), "recovery")
    shrunk = run.last(EventKind.ATTEMPT_STARTED)
    assert shrunk.data["world_size"] == 1
    assert shrunk.data["workers"][0]["node_id"] != lost
    new = cluster.add_node()
    run.wait_for(lambda: run.last(EventKind.ATTEMPT_STARTED).data["world_size"] == 2, "growth")
    assert new in {
        worker["node_id"] for worker in run.last(EventKind.ATTEMPT_STARTED).data["workers"]
    }
    grown = run.last(EventKind.ATTEMPT_STARTED).attempt
    run.wait_for(lambda: any(attempt == grown for _, attempt in run.steps()), "a step at full size")
    run.run_dir.request_stop(1, "cancel")
    assert run.wait_for_end() == 0, run.describe()
    run.check_sequence()
    assert [
        (event.data["verdict"], event.data["node_id"]) for event in run.of(EventKind.FAILURE)
    ] == [("node_lost", lost)]
    steps = run.steps()
    check_lossless(run, max(step for step, _ in steps))
    first_of_attempt = {
        attempt: min(step for step, number in steps if number == attempt) for _, attempt in steps
    }
    last_of_attempt = {
        attempt: max(step for step, number in steps if number == attempt) for _, attempt in steps
    }
    for earlier, later in pairwise(sorted(first_of_attempt)):
        assert first_of_attempt[later] <= last_of_attempt[earlier] + 1, "no step is skipped"
    assert [event.data["cause"] for event in run.of(EventKind.ATTEMPT_ENDED)] == [
        "node_lost",
        "resized",
        "stopped",
    ]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A temporary disk with room for a few small files and no more."""
    with mounted_small_disk(tmp_path / "full") as place:
        yield place


def test_a_node_that_is_not_fit_is_found_before_a_step_and_left_out(
    begin: Begin, cluster: RayCluster, full_disk: Path
) -> None:
    unfit = cluster.add_node(TMPDIR=str(full_disk))
    try:
        run = begin(spec(train={"epochs": 3, "global_batch_size": 128}, workers=(2, 3)))
        assert run.wait_for_end() == 0, run.describe()
    finally:
        cluster.kill_node(unfit)
    run.check_sequence()
    [failure] = run.of(EventKind.FAILURE)
    assert (failure.data["verdict"], failure.data["node_id"], failure.attempt) == (
        "node_lost",
        unfit,
        1,
    )
    assert (
        "NodeUnfit: disk: " in failure.data["exception"]
        and "No space left" in failure.data["exception"]
    )
    [started] = run.of(EventKind.ATTEMPT_STARTED)
    assert started.data["world_size"] == 2 and unfit not in {
        worker["node_id"] for worker in started.data["workers"]
    }
    assert run.last(EventKind.FINISHED).data == {"outcome": "succeeded", "reason": None, "step": 36}


def test_a_killed_journal_loses_and_doubles_nothing(begin: Begin) -> None:
    run = begin(small_spec(400, 10), small=True)
    run.wait_for_step(50)
    os.kill(run.actor_pid("JournalActor"), signal.SIGKILL)
    run.wait_for_step(150)
    os.kill(run.actor_pid("JournalActor"), signal.SIGKILL)
    assert run.wait_for_end() == 0, run.describe()
    run.check_sequence()
    assert [step for step, _ in run.steps()] == list(range(1, 401))
    assert run.of(EventKind.FAILURE) == []
    assert run.events[-1].kind is EventKind.FINISHED


def test_a_killed_controller_is_replaced(begin: Begin) -> None:
    run = begin(small_spec(200), small=True)
    run.wait_for_step(30)
    os.kill(run.actor_pid("EverstepController"), signal.SIGKILL)
    assert run.wait_for_end() == 0, run.describe()
    run.check_sequence()
    assert [event.data["verdict"] for event in run.of(EventKind.FAILURE)] == ["control_plane"]
    assert len(run.of(EventKind.RECOVERED)) == 1
    assert [event.attempt for event in run.of(EventKind.ATTEMPT_STARTED)] == [1, 2]
    assert [event.data["cause"] for event in run.of(EventKind.ATTEMPT_ENDED)] == [
        "control_plane",
        "finished",
    ]
    assert run.last(EventKind.FINISHED).data["outcome"] == "succeeded"


@pytest.mark.parametrize("how", ["stopped process", *only_in_chaos("endless loop")])
def test_a_hung_rank_is_found_and_killed(begin: Begin, how: str) -> None:
    tags = {"hang_at": "40"} if how == "endless loop" else {}
    run_spec = small_spec(200, **tags).model_copy(
        update={"recovery": RecoverySpec(hang_timeout_s=5)}
    )
    run = begin(run_spec, small=True)
    run.wait_for_step(35)
    stopped_at = None
    if how == "stopped process":
        os.kill(run.worker(1)["pid"], signal.SIGSTOP)
        stopped_at = time.time()
    assert run.wait_for_end() == 0, run.describe()
    failures = run.of(EventKind.FAILURE)
    assert [(event.data["verdict"], event.data["first_rank"]) for event in failures] == [
        ("hang", 1)
    ]
    recovered = run.last(EventKind.RECOVERED)
    points = [point["at"] for event in run.of(EventKind.METRICS) for point in event.data["points"]]
    before = max(at for at in points if at < failures[0].at)
    after = min(at for at in points if at > failures[0].at)
    # Without a step from the last one to the first again: first nobody knew, and then it was
    # restarted.
    detect_s, recovery_s = failures[0].data["detect_s"], recovered.data["recovery_s"]
    assert detect_s + recovery_s == pytest.approx(after - before, abs=0.5), run.describe()
    assert "recovery.hang_timeout_s" in failures[0].data["exception"]
    assert detect_s >= 5.0 and recovered.data["detect_s"] == detect_s
    if stopped_at is not None:
        assert before == pytest.approx(stopped_at, abs=2.0)
    if how == "endless loop":
        assert "small_loop.py" in failures[0].data["evidence"]["stack"]
    check_lossless(run, 200)


@pytest.mark.core
def test_a_killed_driver_costs_no_step(begin: Begin) -> None:
    run = begin(
        spec(train={"epochs": 5000, "global_batch_size": 64}, checkpoint={"every_steps": 100_000})
    )
    run.wait_for_step(30)
    run.kill_driver()
    run.start(submission=2)
    run.wait_for(lambda: run.of(EventKind.RECOVERED), "the next submission's first step")
    old, _ = read_journal(run.run_dir, 1, None, 100_000)
    reached = max(
        point["step"]
        for event in old
        if event.kind is EventKind.METRICS
        for point in event.data["points"]
    )
    restored = run.last(EventKind.RESTORED).data
    assert (restored["step"], restored["source"], restored["checkpoint"]) == (
        reached,
        "checkpoint",
        f"step-{reached:09d}.s001.a001",
    )
    assert run.last(EventKind.RECOVERED).data["steps_lost"] == 0
    failure = run.last(EventKind.FAILURE).data
    assert (failure["verdict"], failure["first_rank"]) == ("control_plane", None)
    run.run_dir.request_stop(2, "cancel")
    assert run.wait_for_end() == 0, run.describe()
    run.wait_for_no_actors()


@pytest.mark.chaos
def test_ranks_whose_driver_nobody_replaces_save_and_end(begin: Begin) -> None:
    run = begin(
        spec(train={"epochs": 5000, "global_batch_size": 64}, checkpoint={"every_steps": 100_000})
    )
    run.wait_for_step(30)
    run.kill_driver()
    run.wait_for_no_actors()
    *_, manifest = CheckpointStore(run.run_dir).list()
    run.read()
    assert manifest.step == max(step for step, _ in run.steps()), (
        "the last step that was done is kept"
    )
    assert not (shared_memory_root() / run.run_dir.run_id).exists()


def test_a_pause_is_heard_while_the_run_waits_for_capacity(begin: Begin) -> None:
    run = begin(small_spec(100, workers=(3, 3)), small=True)
    waiting = run.wait_for(lambda: run.of(EventKind.WAITING), "waiting")[0]
    assert waiting.data["code"] == "waiting_for_capacity"
    assert waiting.data["missing"] == {"CPU": 1.0}
    run.run_dir.request_stop(1, "pause")
    assert run.wait_for_end() == 0, run.describe()
    assert run.of(EventKind.ATTEMPT_STARTED) == []
    finished = run.last(EventKind.FINISHED).data
    assert (finished["outcome"], finished["reason"]["code"]) == ("stopped", "paused_by_user")


def test_a_terminated_driver_leaves_its_run_unfinished_and_the_next_goes_on(begin: Begin) -> None:
    run = begin(small_spec(120), small=True)
    run.wait_for_step(30)
    assert run.driver is not None
    run.driver.send_signal(signal.SIGTERM)
    assert run.wait_for_end() not in (0, 3)
    assert run.of(EventKind.FINISHED) == []
    last_attempt = run.last(EventKind.ATTEMPT_STARTED).attempt

    run.events.clear()
    run.start(submission=2)
    assert run.wait_for_end() == 0, run.describe()
    assert run.of(EventKind.ATTEMPT_STARTED)[0].attempt == last_attempt + 1, (
        "attempts are counted over the run"
    )
    assert [(event.data["verdict"], event.attempt) for event in run.of(EventKind.FAILURE)] == [
        ("control_plane", last_attempt)
    ]
    assert len(run.of(EventKind.RECOVERED)) == 1
    assert run.last(EventKind.FINISHED).data["outcome"] == "succeeded"

    run.events.clear()
    run.start(submission=1)
    assert run.wait_for_end() == 3, "a newer submission has taken over"
