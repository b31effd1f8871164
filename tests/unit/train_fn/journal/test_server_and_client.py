"""The journal's client and actor without a cluster: what is delivered, how often, and what the
client keeps while it is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from everstep.wire.events import EventKind
from storage.errors import StorageFull, StorageUnavailable
from storage.filesystem import open_storage
from storage.logs.journal import read_journal
from storage.run_control import ProfileOrder, StackOrder, Stop
from storage.run_dir import RunDir
from tests.support.service_process import wait_for
from tests.support.small_disk import mounted_small_disk
from train_fn.journal import client as client_module
from train_fn.journal import server
from train_fn.journal.client import ActorJournalClient, PassedOrders
from train_fn.journal.follower import Reply, SourceEvent
from train_fn.journal.server import JournalServer


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(open_storage(str(tmp_path)), "run_j")


def event(
    source_n: int, kind: EventKind = EventKind.EVALUATED, attempt: int = 1, **data: object
) -> SourceEvent:
    return SourceEvent(source_n, 5.0, kind, attempt, data)


def points(*steps: int) -> dict[str, object]:
    return {"points": [{"step": step, "at": 1.0, "values": {}} for step in steps]}


def test_a_process_whose_name_a_journal_knows_already_loses_no_event(run_dir: RunDir) -> None:
    """The same submission by a second process: of a run that was started twice, or after a database
    was put back."""
    for step in (1, 2):
        client = ActorJournalClient(
            JournalServer(run_dir, 1).deliver, "rank-0.a001", 1, interval_s=0.005
        )
        for _ in range(5):
            client.emit(EventKind.EVALUATED, {"step": step})
        assert client.close(timeout_s=20)
    assert [line.data["step"] for line in read_journal(run_dir, 1)[0]] == [1] * 5 + [2] * 5


def test_a_stop_once_announced_is_told_to_everyone(run_dir: RunDir) -> None:
    actor = JournalServer(run_dir, 1)
    actor.deliver("driver", [], "pause")
    assert actor.deliver("rank-0.a001", []).stop == "pause"
    actor.deliver("driver", [], "cancel")
    assert actor.deliver("rank-1.a001", []).stop == "cancel"


def test_a_profile_that_the_driver_passes_on_is_told_to_every_rank_also_by_an_actor_that_comes_back(
    run_dir: RunDir,
) -> None:
    actor = JournalServer(run_dir, 1)
    assert actor.deliver("rank-1.a003", []).profile is None
    actor.deliver(
        "driver", [event(1, EventKind.PROFILE_ORDERED, attempt=3, id="prof_1", rank=1, steps=4)]
    )
    order = ProfileOrder("prof_1", rank=1, steps=4, attempt=3)
    assert actor.deliver("rank-1.a003", []).profile == order
    actor._writer.close()  # as its process ends
    again = JournalServer(run_dir, 1)
    client = ActorJournalClient(again.deliver, "rank-1.a003", 3, interval_s=0.005)
    client.ask(timeout_s=20)
    assert client.profile_ordered == order and client.stacks_ordered is None
    run_dir.order_stacks(1, StackOrder("stk_1", attempt=3))
    orders = PassedOrders(run_dir, 1, client)
    orders.tick()
    orders.tick()  # each is passed on once
    assert client.flush(timeout_s=20)
    client.ask(timeout_s=20)
    assert client.stacks_ordered == StackOrder("stk_1", attempt=3)
    assert client.close(timeout_s=20)


class Faulty:
    """The way to a real actor that loses calls and replies on order."""

    def __init__(self, actor: JournalServer) -> None:
        self.actor = actor
        self.lose_calls = 0
        self.lose_replies = 0
        self.lock = threading.Lock()

    def __call__(self, source: str, events: Sequence[SourceEvent], stop: Stop | None) -> Reply:
        with self.lock:
            if self.lose_calls:
                self.lose_calls -= 1
                raise StorageUnavailable("away")
            reply = self.actor.deliver(source, events, stop)
            if self.lose_replies:
                self.lose_replies -= 1
                raise ConnectionError("the reply was lost")
            return reply


@pytest.mark.parametrize(("lose_calls", "lose_replies"), [(0, 0), (3, 0), (0, 3), (2, 2)])
def test_every_event_arrives_once_and_in_order(
    run_dir: RunDir, lose_calls: int, lose_replies: int
) -> None:
    way = Faulty(JournalServer(run_dir, 1))
    way.lose_calls, way.lose_replies = lose_calls, lose_replies
    client = ActorJournalClient(way, "rank-0.a001", 1, interval_s=0.005)
    for step in range(50):
        client.emit(EventKind.EVALUATED, {"step": step})
    assert client.close(timeout_s=20)
    assert [line.data["step"] for line in read_journal(run_dir, 1)[0]] == list(range(50))


def test_memory_stays_bounded_while_the_journal_is_away(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_POINTS", 100)
    way = Faulty(JournalServer(run_dir, 1))
    with way.lock:
        client = ActorJournalClient(way, "rank-0.a001", 1, interval_s=0.005)
        client.emit(EventKind.EVALUATED, {"step": 0})
        assert not client.flush(timeout_s=0.05), "the journal is away"
        for step in range(1, 1001):
            client.emit(EventKind.METRICS, {"points": [{"step": step, "at": 1.0, "values": {}}]})
    assert client.close(timeout_s=20)
    steps = [
        point["step"]
        for line in read_journal(run_dir, 1)[0]
        if line.kind is EventKind.METRICS
        for point in line.data["points"]
    ]
    assert len(steps) <= 100
    assert steps == sorted(steps)
    assert steps[-1] == 1000, "the newest is kept"


def test_a_client_learns_the_stop_the_last_step_and_that_it_was_superseded(run_dir: RunDir) -> None:
    actor = JournalServer(run_dir, 1)
    superseded = threading.Event()
    old = ActorJournalClient(
        actor.deliver, "rank-0.a001", 1, interval_s=0.005, on_superseded=superseded.set
    )
    old.emit(EventKind.METRICS, {"points": [{"step": 7, "at": 1.0, "values": {}}]})
    assert old.flush(timeout_s=20)
    assert not superseded.is_set()
    controller = ActorJournalClient(actor.deliver, "controller", 1, interval_s=0.005)
    controller.announce_stop("cancel")
    controller.emit(EventKind.ATTEMPT_STARTED, {}, attempt=2)
    assert controller.flush(timeout_s=20)
    controller.ask(timeout_s=20)
    assert controller.last_step == 7
    assert superseded.wait(timeout=60)
    old.ask(timeout_s=20)
    assert old.stop_requested == "cancel"
    assert old.close(timeout_s=20)
    assert controller.close(timeout_s=20)


def test_an_answer_counts_from_when_it_was_asked_for_and_for_a_while(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = Faulty(JournalServer(run_dir, 1))
    client = ActorJournalClient(way, "rank-0.a001", 1, interval_s=0.005, beat_s=0.01)
    assert client.holds_lease(timeout_s=20)
    with way.lock:  # a question is under way, which is answered late
        asked = client._asked_at
        monkeypatch.setattr(client_module, "LEASE_S", 0.2)
        wait_for(lambda: time.monotonic() > asked + 0.5, 60, "the lease's end")
        assert not client.holds_lease(timeout_s=0.0)
        assert not client.holds_lease(timeout_s=0.05)
        way.lose_calls = 2
    assert client.holds_lease(timeout_s=20)
    assert client.close(timeout_s=20)


def test_a_journal_that_cannot_be_opened_at_first_takes_events_later(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An actor whose constructor raised is dead for good, and nobody would notice."""
    JournalServer(run_dir, 1).deliver(
        "controller", [event(1, EventKind.ATTEMPT_STARTED, attempt=3)]
    )

    def away(*_: object, **_options: object) -> None:
        raise StorageUnavailable("for a moment")

    with monkeypatch.context() as broken:
        broken.setattr(server, "journal_events", away)
        actor = JournalServer(run_dir, 1)
        with pytest.raises(StorageUnavailable):
            actor.deliver("driver", [event(1)], "cancel")
    reply = actor.deliver("driver", [event(1)])
    assert (reply.acknowledged, reply.stop, reply.progress.attempt) == (1, "cancel", 3)


def test_a_full_disk_says_nothing_about_the_ranks(tmp_path: Path) -> None:
    """Ranks that train while nobody can write what they tell are not taken for hung."""
    with mounted_small_disk(tmp_path / "disk") as disk:
        actor = JournalServer(RunDir(open_storage(str(disk)), "run_j"), 1)
        actor.deliver("controller", [event(1, EventKind.ATTEMPT_STARTED, attempt=1)])
        filler = disk / "filler"
        with pytest.raises(OSError, match="No space left"):
            filler.write_bytes(bytes(4 << 20))
        step = event(1, EventKind.METRICS, points=[{"step": 9, "at": 1.0, "values": {}}] * 200)
        with pytest.raises(StorageFull):
            actor.deliver("rank-0.a001", [step])
        progress = actor.deliver("controller", []).progress
        assert (progress.is_written, progress.last_step) == (False, None)
        filler.unlink()
        progress = actor.deliver("rank-0.a001", [step]).progress
        assert (progress.is_written, progress.last_step) == (True, 9)


def test_only_metrics_say_up_to_which_step_the_journal_has_them(run_dir: RunDir) -> None:
    """After the head was away, an attempt begins beyond the newest metrics that arrived."""

    def metrics(number: int, *steps: int) -> SourceEvent:
        points = [{"step": step, "at": 1.0, "values": {}} for step in steps]
        return event(number, EventKind.METRICS, points=points)

    journal = JournalServer(run_dir, 2, told_step=22)
    told = [
        journal.deliver("rank-0.a001", [each]).progress.told_step
        for each in (
            event(1, EventKind.RESTORED, step=60),
            event(2, EventKind.EVALUATED, step=60),
            event(3, EventKind.CHECKPOINT_COMMITTED, step=60),
            metrics(4, 23, 60, 61),
            event(5, EventKind.RESTORED, step=50),
            metrics(6, 51),
        )
    ]
    assert told == [22, 22, 22, 61, 50, 51]
