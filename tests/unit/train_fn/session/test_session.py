"""The order of a run, as ``session.py`` writes it down: two ranks, with a state that each holds
whole or in pieces, from the state that they take over to the one that they leave."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.wire.events import EventKind
from storage import claims
from storage.checkpoints.store import CheckpointStore
from storage.errors import StorageUnavailable
from storage.logs.journal_writer import JournalWriter
from storage.run_control import Stop
from tests.support.one_rank import journal_of
from tests.support.two_ranks import Rank, Together, both
from train_fn.checkpoints import cadence
from train_fn.checkpoints.saver import Saver
from train_fn.errors import Replaced, StepNotWhole
from train_fn.session import session as session_module
from train_fn.snapshots.store import SnapshotStore, snapshot_store

pytestmark = pytest.mark.own_process

Start = Callable[..., list[Rank]]


@pytest.fixture(params=["whole", "pieces"])
def pieces(request: pytest.FixtureRequest) -> bool:
    return request.param == "pieces"


@pytest.fixture
def start(
    tmp_path: Path, shared_memory: Path, pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    """Start an attempt of two ranks."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(session_module, "end_process_group", lambda: None)
    begun = []

    def started(attempt: int = 1, *, begins: bool = True, **how: Any) -> list[Rank]:
        how |= {"together": Together(), "in_pieces": pieces, "attempt": attempt}
        ranks = [Rank(rank, tmp_path, **how) for rank in (0, 1)]
        begun.extend(ranks)
        if begins:
            both(Rank.begin, ranks)
        return ranks

    yield started
    for rank in begun:
        rank.session.keeper.let_go()


def steps(ranks: list[Rank], count: int, **how: Any) -> None:
    for _ in range(count):
        both(lambda rank: rank.step(**how), ranks)


# ---------------------------------------------------------------- restore


def test_all_take_over_the_newest_state_that_a_node_still_has(start: Start) -> None:
    ranks = start()
    assert [rank.beginning for rank in ranks] == [("fresh", 0, 0.0)] * 2
    assert len(journal_of(ranks[0].ctx).of_kind(EventKind.TRAINING_STARTED)) == 1
    steps(ranks, 3)
    both(Rank.gate, ranks)
    assert both(Rank.leave, ranks) == [(3, None)] * 2
    shutil.rmtree(snapshot_store(ranks[0].ctx).directory)
    assert [rank.beginning for rank in start(2)] == [("snapshot", 3, 3.0)] * 2


def test_what_is_not_as_it_was_left_is_named_and_an_older_state_taken(start: Start) -> None:
    ranks = start()
    steps(ranks, 1, saves=True)
    while not CheckpointStore(ranks[0].ctx.run_dir).list():
        steps(ranks, 1)
    steps(ranks, 1)
    both(Rank.leave, ranks)
    for rank in ranks:
        for path in snapshot_store(rank.ctx).directory.glob("*.pt"):
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    ranks = start(2)
    assert [rank.beginning for rank in ranks] == [("checkpoint", 1, 1.0)] * 2
    assert ranks[0].session.restored.rejected == ranks[1].session.restored.rejected != ()
    assert {each.step for rank in ranks for each in snapshot_store(rank.ctx).labels()} <= {1}


def test_the_run_is_claimed_before_anything_is_read_that_older_attempts_leave(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, claimed = start(begins=False), []
    read = SnapshotStore.labels

    def reading(store: SnapshotStore) -> Any:
        if "node0" in store.directory.name:
            run_dir = ranks[0].ctx.run_dir
            claimed.append(run_dir.files.exists(run_dir.claim_path((1, 1))))
        return read(store)

    monkeypatch.setattr(SnapshotStore, "labels", reading)
    both(Rank.begin, ranks)
    assert claimed[0]


# ---------------------------------------------------------------- begin


def submits(rank: Rank) -> bool:
    JournalWriter(rank.ctx.run_dir, 2).close()
    return True


def attempts(rank: Rank) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "process_nonce", lambda: "another")
        claims.claim_attempt(rank.ctx.run_dir, (1, 2))
    return True


@pytest.mark.parametrize("pieces", [False])
@pytest.mark.parametrize(
    ("meanwhile", "error", "why"),
    [
        (lambda rank: False, StorageUnavailable, "did not take the attempt's beginning"),
        (submits, Replaced, "submission 2 of run run_saver has taken over from submission 1"),
        (attempts, Replaced, "attempt 2 of run run_saver has taken over from attempt 1"),
    ],
)
def test_no_step_is_taken_before_the_beginning_is_durable_and_the_run_is_ours(
    meanwhile: Callable[[Rank], bool], error: type[Exception], why: str, pieces: bool, start: Start
) -> None:
    """Whoever takes over while the beginning becomes durable may have read the journal before."""
    ranks = start(begins=False)
    JournalWriter(ranks[0].ctx.run_dir, 1).close()
    ranks[0].ctx.journal.flush = lambda timeout_s: meanwhile(ranks[0])  # type: ignore[method-assign]
    both(lambda rank: rank.session.restore(lambda state, origin: state), ranks)
    both(lambda rank: rank.session.open(), ranks)
    with pytest.raises(error, match=why):
        ranks[0].session.begin({})
    assert journal_of(ranks[0].ctx).of_kind(EventKind.TRAINING_STARTED) == []


# ---------------------------------------------------------------- agree, commit, keep


def test_ranks_that_made_something_else_of_a_step_do_not_go_on(start: Start) -> None:
    ranks = start()
    steps(ranks, 1)
    for rank in ranks:
        with pytest.raises(StepNotWhole, match="rank 1 made no step"):
            rank.session.agree(1, "rank 1 made no step")
    assert both(Rank.leave, ranks) == [(1, None)] * 2, "it changed nothing"


def test_between_two_states_a_rank_leaves_none(start: Start, pieces: bool) -> None:
    """Of a state in pieces the one before lies on the nodes already."""
    ranks = start()
    steps(ranks, 2)
    both(Rank.change, ranks)
    left = (2, None) if pieces else (None, "between two states")
    assert both(Rank.leave, ranks) == [left] * 2
    expected = ("snapshot", 2, 2.0) if pieces else ("fresh", 0, 0.0)
    assert [rank.beginning for rank in start(2)] == [expected] * 2


def test_a_block_that_does_not_count_its_step_commits_nothing(start: Start) -> None:
    [rank, _] = start()
    with pytest.raises(AssertionError, match="step 1 was not counted once"), rank.session.commit():
        pass
    assert not rank.state.complete


def test_a_step_is_reported_once_no_death_can_take_it_any_more(start: Start, pieces: bool) -> None:
    """A state that each rank holds lives while one of them does; one in pieces after a gate."""
    ranks = start()
    steps(ranks, 3)
    ranks[0].session.reporter.hand_over()
    assert len(journal_of(ranks[0].ctx).points) == (2 if pieces else 3)
    both(Rank.gate, ranks)
    assert len(journal_of(ranks[0].ctx).points) == 3


def test_all_ranks_of_a_node_may_die_between_two_steps(start: Start) -> None:
    """A state is there by then: of whole ones the newest that was published."""
    ranks = start(nodes=1)
    steps(ranks, 1)
    while not snapshot_store(ranks[0].ctx).labels():
        time.sleep(0.01)
    both(Rank.gate, ranks)
    assert [rank.beginning for rank in start(2, nodes=1)] == [("snapshot", 1, 1.0)] * 2


# ---------------------------------------------------------------- leave, finish


@pytest.mark.parametrize("frees", [True, False])
def test_a_rank_lets_its_peers_go_before_it_leaves_its_state(
    frees: bool, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where to leave frees nobody, the state comes first: an abort may take long."""
    rank = start()[0]
    monkeypatch.setattr(session_module, "fails_by_itself", lambda: frees)
    monkeypatch.setattr(session_module, "end_process_group", lambda: rank.did.append("peers"))
    rank.leave()
    order = "let go, peers, close, keep" if frees else "let go, close, keep, peers"
    assert rank.did == order.split(", ")
    rank.session.saver.save_if_due(due=True, is_best=True)
    assert rank.session.saver.wait_idle(0.0), "nothing is saved any more"


def test_the_last_checkpoint_has_the_newest_state_and_nothing_stays_on_nodes(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anything published once ranks meet: the first that leaves removes what is there."""
    ranks, begin_last = start(nodes=1), Saver.begin_last
    steps(ranks, 3)

    def begin_once_nothing_is_published(saver: Saver, **how: Any) -> Any:
        while any(each.name == "snapshot-publisher" for each in threading.enumerate()):
            time.sleep(0.01)
        return begin_last(saver, **how)

    monkeypatch.setattr(Saver, "begin_last", begin_once_nothing_is_published)
    assert both(Rank.finish, ranks) == [None, None]
    [manifest] = CheckpointStore(ranks[0].ctx.run_dir).list()
    assert manifest.step == 3, "no other one was due"
    assert snapshot_store(ranks[0].ctx).labels() == []
    assert len(journal_of(ranks[0].ctx).points) == 3


@pytest.mark.parametrize("stop", [None, "pause"])
def test_a_last_checkpoint_that_fails_fails_all_ranks_or_leaves_the_state(
    stop: Stop | None, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise StorageUnavailable("no space left")

    monkeypatch.setattr(CheckpointStore, "begin", full)
    monkeypatch.setattr(cadence, "RETRY_S", 0.001)
    for name in ("FINAL_PATIENCE_S", "STOP_PATIENCE_S"):
        monkeypatch.setattr(session_module, name, 0.1)
    ranks = start(checkpoint={"max_failed_saves": 1, "on_failed_saves": "pause"})
    steps(ranks, 2)
    errors = both(lambda rank: rank.finish(stop), ranks)
    if stop is None:
        assert all("no space left" in str(error) for error in errors)
    else:
        assert errors == [None, None]
        assert [rank.beginning for rank in start(2)] == [("snapshot", 2, 2.0)] * 2
