"""Drills in the driver: orders in a real run directory, a real journal, and faults that only take
notes."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pytest

from everstep.wire.drills import DrillKind
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.errors import CorruptCheckpoint, CorruptFile
from storage.filesystem import open_storage
from storage.logs.journal import JournalEvent, read_journal
from storage.run_control import DrillOrder
from storage.run_dir import RunDir
from train_fn.drills import DrillRefused, Drills, plan
from train_fn.journal.client import ActorJournalClient
from train_fn.journal.server import JournalServer
from train_fn.recovery.history import RankPlace, read_history

PLACES = (RankPlace(0, "node-a", 100), RankPlace(1, "node-b", 101), RankPlace(2, "head", 102))


class NotedFaults:
    """Takes notes of what is done, and of whether the journal had told of a drill by then."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.done: list[tuple[object, ...]] = []
        self.problem: str | None = None

    def head_node_ids(self) -> Collection[str]:
        return {"head"}

    def note(self, *what: object) -> None:
        if self.problem is not None:
            raise DrillRefused(self.problem)
        is_reported = bool(of(self.run_dir, EventKind.DRILL_STARTED))
        self.done.append((*what, "reported" if is_reported else "unreported"))

    def signal(self, ranks: Sequence[RankPlace], signal_number: int) -> None:
        self.note(signal.Signals(signal_number).name, *(place.pid for place in ranks))

    def kill_without_trace(self, ranks: Sequence[RankPlace], run_id: str) -> None:
        self.note("kill", *(place.pid for place in ranks))

    def kill_node(self, node_id: str) -> None:
        self.note("kill", node_id)

    def drain_node(self, node_id: str, deadline_s: float) -> None:
        self.note("drain", node_id, deadline_s)

    def kill_driver(self) -> None:
        self.note("kill driver")


class Rig:
    """One submission's driver, as far as drills know it."""

    def __init__(self, run_dir: RunDir, submission: int = 1) -> None:
        self.run_dir = run_dir
        self.submission = submission
        self.faults = NotedFaults(run_dir)
        source = f"driver-{id(self)}"
        self.journal = ActorJournalClient(
            JournalServer(run_dir, submission).deliver, source, 0, interval_s=0.005
        )
        self.drills = Drills(run_dir, submission, self.journal, lambda: self.faults)

    def begin_attempt(self, attempt: int = 1) -> None:
        workers = [
            {"rank": place.rank, "node_id": place.node_id, "node_ip": "10.0.0.1", "pid": place.pid}
            for place in PLACES
        ]
        self.journal.emit(
            EventKind.ATTEMPT_STARTED,
            {"world_size": len(workers), "workers": workers},
            attempt=attempt,
        )
        assert self.journal.flush(20)

    def order(
        self, kind: DrillKind, rank: int = 1, attempt: int = 1, drill_id: str = "drill_1"
    ) -> None:
        self.run_dir.order_drill(self.submission, DrillOrder(drill_id, kind, rank, attempt))
        self.drills.tick()
        assert self.journal.flush(20)


def of(run_dir: RunDir, kind: EventKind) -> list[JournalEvent]:
    return [
        event
        for number in run_dir.submissions()
        for event in read_journal(run_dir, number)[0]
        if event.kind is kind
    ]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(open_storage(str(tmp_path)), "run_d")


@pytest.fixture
def rig(run_dir: RunDir) -> Iterator[Rig]:
    made = Rig(run_dir)
    made.begin_attempt()
    yield made
    made.journal.close(20)


def save(run_dir: RunDir, step: int) -> str:
    writer = CheckpointStore(run_dir).begin(step, 1, 1)
    for name, content in (("model.pt", b"weights" * 1000), ("train_state.pt", b"state")):
        with writer.write_file(name) as stream:
            stream.write(content)
    return writer.commit(epoch=0, parent=None, world_size=3, sample_digest="s", metrics={}).name


def test_an_order_travels_through_the_run_directory(run_dir: RunDir, tmp_path: Path) -> None:
    assert run_dir.drill_ordered(1) is None
    order = DrillOrder("drill_1", DrillKind.HANG_WORKER, 1, 4)
    run_dir.order_drill(1, order)
    assert run_dir.drill_ordered(1) == order
    assert run_dir.drill_ordered(2) is None, "an older submission's drill is nobody else's"
    (tmp_path / "runs/run_d/control/s001.drill.json").write_text(
        '{"id": "drill_1", "kind": "unheard of"}'
    )
    with pytest.raises(CorruptFile, match="is not a drill"):
        run_dir.drill_ordered(1)


@pytest.mark.parametrize(
    ("kind", "done"),
    [
        (DrillKind.KILL_WORKER, ("SIGKILL", 101)),
        (DrillKind.HANG_WORKER, ("SIGSTOP", 101)),
        (DrillKind.KILL_NODE, ("kill", "node-b")),
        (DrillKind.DRAIN_NODE, ("drain", "node-b", 30.0)),
        (DrillKind.KILL_DRIVER, ("kill driver",)),
    ],
)
def test_each_kind_hits_what_it_names_once_it_is_told(
    rig: Rig, kind: DrillKind, done: tuple[object, ...]
) -> None:
    rig.order(kind)
    assert rig.faults.done == [(*done, "reported")]
    [started] = of(rig.run_dir, EventKind.DRILL_STARTED)
    assert (started.data["id"], started.data["kind"], started.data["rank"], started.attempt) == (
        "drill_1",
        kind.value,
        1,
        1,
    )
    assert started.data["pid"] == (os.getpid() if kind is DrillKind.KILL_DRIVER else 101)


def test_an_order_is_carried_out_once_by_whatever_driver(rig: Rig) -> None:
    rig.order(DrillKind.KILL_WORKER)
    rig.drills.tick()
    again = Rig(rig.run_dir)  # the same submission's driver, started anew
    again.drills.tick()
    newer = Rig(rig.run_dir, submission=2)
    newer.drills.tick()
    assert len(rig.faults.done) == 1 and again.faults.done == newer.faults.done == []
    rig.order(DrillKind.HANG_WORKER, drill_id="drill_2")
    assert len(rig.faults.done) == 2
    for other in (again, newer):
        other.journal.close(20)


@pytest.mark.parametrize(
    ("kind", "rank", "attempt", "words"),
    [
        (
            DrillKind.KILL_WORKER,
            1,
            2,
            "attempt 2, for whose ranks the drill was ordered, has ended",
        ),
        (DrillKind.KILL_WORKER, 3, 1, "has no rank 3"),
        (DrillKind.KILL_NODE, 2, 1, "the cluster's head"),
        (DrillKind.DRAIN_NODE, 2, 1, "the cluster's head"),
        (DrillKind.CORRUPT_CHECKPOINT, 0, 1, "needs two checkpoints"),
    ],
)
def test_what_is_refused_touches_nothing_and_says_why(
    rig: Rig, kind: DrillKind, rank: int, attempt: int, words: str
) -> None:
    rig.order(kind, rank, attempt)
    assert rig.faults.done == [] and of(rig.run_dir, EventKind.DRILL_STARTED) == []
    [refused] = of(rig.run_dir, EventKind.DRILL_FAILED)
    assert words in refused.data["problem"] and refused.data["id"] == "drill_1"


def test_ranks_of_an_attempt_that_has_ended_are_not_hit(rig: Rig) -> None:
    rig.journal.emit(EventKind.ATTEMPT_ENDED, {"cause": "worker_lost", "last_step": 3}, attempt=1)
    assert rig.journal.flush(20)
    with pytest.raises(DrillRefused, match="has ended"):
        plan(DrillOrder("drill_1", DrillKind.KILL_WORKER, 1, 1), read_history(rig.run_dir), ())


def test_a_fault_that_fails_is_told(rig: Rig) -> None:
    rig.faults.problem = "process 101 is gone"
    rig.order(DrillKind.KILL_WORKER)
    assert [event.data["problem"] for event in of(rig.run_dir, EventKind.DRILL_FAILED)] == [
        "process 101 is gone"
    ]


def test_the_newest_checkpoint_is_damaged_while_all_ranks_stand_still(rig: Rig) -> None:
    older, newer = save(rig.run_dir, 10), save(rig.run_dir, 20)
    rig.order(DrillKind.CORRUPT_CHECKPOINT)
    assert rig.faults.done == [
        ("SIGSTOP", 100, 101, 102, "unreported"),
        ("kill", 100, 101, 102, "reported"),
    ]
    assert of(rig.run_dir, EventKind.DRILL_STARTED)[0].data["checkpoint"] == newer
    with pytest.raises(CorruptCheckpoint):
        CheckpointStore(rig.run_dir).verify(newer)
    found, rejected = CheckpointStore(rig.run_dir).newest_valid()
    assert found is not None and found.name == older and [each.name for each in rejected] == [newer]


def test_ranks_go_on_where_the_checkpoint_cannot_be_damaged(rig: Rig) -> None:
    save(rig.run_dir, 10)
    newest = save(rig.run_dir, 20)
    directory = Path(CheckpointStore(rig.run_dir).path(newest))
    for name in ("model.pt", "train_state.pt"):
        (directory / name).unlink()
    rig.order(DrillKind.CORRUPT_CHECKPOINT)
    assert [step[0] for step in rig.faults.done] == ["SIGSTOP", "SIGCONT"]
    assert len(of(rig.run_dir, EventKind.DRILL_FAILED)) == 1
