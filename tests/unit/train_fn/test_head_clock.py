"""Times that a process tells where its host's clock is wrong."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from everstep.wire.events import EventKind
from storage.filesystem import open_storage
from storage.logs.journal import read_journal
from storage.run_control import Stop
from storage.run_dir import RunDir
from tests.support.service_process import wait_for
from train_fn import clock as head_clock
from train_fn.journal.client import ActorJournalClient
from train_fn.journal.follower import Reply, SourceEvent
from train_fn.journal.server import JournalServer


@pytest.fixture(autouse=True)
def nothing_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_clock, "_ahead_s", 0.0)


@pytest.mark.parametrize(
    ("asked_at", "head_at", "answered_at", "ahead_s"),
    [
        (1000.0, 910.2, 1000.4, 90.0),
        (1000.0, 1090.2, 1000.4, -90.0),
        (1000.0, 999.4, 1000.2, 0.0),  # what NTP and the network explain
        (1000.0, 930.0, 1020.0, 0.0),  # too slow to tell
        (1000.0, 970.0, 985.0, 0.0),  # the clock was put right in between
    ],
)
def test_a_quick_reply_tells_how_far_this_hosts_clock_is_off(
    monkeypatch: pytest.MonkeyPatch,
    asked_at: float,
    head_at: float,
    answered_at: float,
    ahead_s: float,
) -> None:
    head_clock.learn(asked_at, head_at, answered_at)
    monkeypatch.setattr(time, "time", lambda: 2000.0)
    monkeypatch.setattr(time, "monotonic", lambda: 70.0)
    assert head_clock.now() == pytest.approx(2000.0 - ahead_s)
    assert head_clock.time_of(50.0) == pytest.approx(1980.0 - ahead_s)


def test_a_clock_that_was_put_right_is_believed_again() -> None:
    head_clock.learn(1090.0, 1000.0, 1090.0)
    head_clock.learn(1001.0, 1001.0, 1001.0)
    before = time.time()
    assert before <= head_clock.now() <= time.time()


def test_events_are_told_by_the_journals_clock(tmp_path: Path) -> None:
    run_dir = RunDir(open_storage(str(tmp_path)), "run_clock")
    actor = JournalServer(run_dir, 1)

    def deliver(source: str, events: Sequence[SourceEvent], stop: Stop | None) -> Reply:
        return dataclasses.replace(actor.deliver(source, events, stop), at=time.time() - 5000.0)

    client = ActorJournalClient(deliver, "rank-0.a001", 1, interval_s=0.005)
    wait_for(lambda: head_clock.now() < time.time() - 4000.0, 30, "a quick reply")
    before = time.time()
    client.emit(EventKind.EVALUATED, {"step": 1})
    assert client.close(timeout_s=20)
    [line] = read_journal(run_dir, 1)[0]
    assert before - 5002.0 < line.at < time.time() - 4998.0
