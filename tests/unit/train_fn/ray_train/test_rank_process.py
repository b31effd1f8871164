"""What a rank tells the controller by itself, so that it need not be asked often."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from everstep.wire import ErrorKind
from train_fn.errors import EndedItself
from train_fn.loop.attempt import agreed_offer
from train_fn.ray_train import rank_process, worker_actor
from train_fn.recovery.evidence import describe_error
from train_fn.recovery.launch import RankLaunch
from train_fn.step.peers import GoingOver


def attempt(number: int) -> rank_process._Attempt:
    return rank_process._Attempt(RankLaunch(number, 0.0))


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process, "_attempt", attempt(1))


class Waiting:
    """A call of ``wait_for_news``, and what it returned."""

    def __init__(self) -> None:
        self.has_trained: bool | None = None
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()

    def _wait(self) -> None:
        self.has_trained = rank_process.wait_for_news()

    def ends_within(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()


def test_every_report_is_told_once_and_the_rank_trains_on() -> None:
    for _ in range(3):
        waiting = Waiting()
        assert not waiting.ends_within(0.1), "nothing to take"
        rank_process.note_report()  # as with every report
        assert waiting.ends_within(20) and waiting.has_trained is False


def test_a_report_that_comes_while_nobody_waits_is_told_to_who_waits_next() -> None:
    rank_process.note_report()
    waiting = Waiting()
    assert waiting.ends_within(20) and waiting.has_trained is False


def test_a_rank_that_has_trained_is_asked_though_its_thread_goes_on() -> None:
    reported = threading.Event()
    training = threading.Thread(target=reported.wait)
    training.start()
    rank_process.report_end_of(training)
    waiting = Waiting()
    assert not waiting.ends_within(0.1), "it trains"
    rank_process.note_trained()  # as the rank does before it waits for its reports
    assert waiting.ends_within(20) and waiting.has_trained and training.is_alive()
    reported.set()
    training.join(20)


def test_a_rank_whose_thread_ends_otherwise_is_asked_too() -> None:
    training = threading.Thread(target=lambda: None)
    training.start()
    rank_process.report_end_of(training)
    waiting = Waiting()
    assert waiting.ends_within(20) and waiting.has_trained


def test_a_rank_that_lets_go_answers_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort may take long; its rank must not be taken for stopped."""
    begun, ended = threading.Event(), threading.Event()

    def abort() -> None:
        begun.set()
        ended.wait(30)

    monkeypatch.setattr(rank_process, "abort_collectives", abort)
    rank_process.abandon()
    assert begun.wait(10), "in a thread of its own"
    ended.set()


def _wait_for_a_peer_that_lives(rank: int, address: str, results: Any) -> None:
    """Rank 0 waits in a collective that its peer never enters, and is given up."""
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        threading.Event().wait(60)
    rank_process._attempt = attempt(1)

    def train() -> None:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as exc:
            results.send(describe_error(exc, 0).collateral)

    group = dist.group.WORLD
    training = threading.Thread(target=train)
    training.start()
    rank_process.report_end_of(training)
    rank_process.abandon()
    training.join()
    os._exit(0)


@pytest.mark.slow
def test_a_rank_that_is_given_up_closes_connections_that_nobody_else_closes(
    tmp_path: Path,
) -> None:
    context = multiprocessing.get_context("forkserver")
    mine, theirs = context.Pipe(duplex=False)
    address = f"file://{tmp_path}/meet"
    ranks = [
        context.Process(target=_wait_for_a_peer_that_lives, args=(rank, address, theirs))
        for rank in range(2)
    ]
    for each in ranks:
        each.start()
    try:
        assert mine.poll(50), "its peer waits longer"
        assert mine.recv() is True, "nobody is to blame for it"
    finally:
        for each in ranks:
            each.kill()
            each.join()


def test_the_end_of_an_earlier_attempt_is_no_news_of_the_one_that_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on = threading.Event()
    training = threading.Thread(target=goes_on.wait)
    training.start()
    rank_process.report_end_of(training)
    monkeypatch.setattr(rank_process, "_attempt", attempt(2))
    goes_on.set()
    training.join(20)
    for thread in threading.enumerate():
        if thread.name == "join-training":
            thread.join(20)
    waiting = Waiting()
    assert not waiting.ends_within(0.1), "the next attempt trains"
    rank_process.note_trained()
    assert waiting.ends_within(20) and waiting.has_trained


def test_an_attempt_that_has_ended_frees_the_call_that_waits_for_its_news() -> None:
    before = rank_process._current()
    waiting = Waiting()
    before.end()
    assert waiting.ends_within(20) and waiting.has_trained


def test_a_process_whose_earlier_attempt_still_runs_takes_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that lives on would abort the collectives of the next attempt, or train in it."""
    monkeypatch.setattr(rank_process, "ABORT_ENDS_S", 0.05)
    ended = threading.Event()
    monkeypatch.setattr(rank_process, "abort_collectives", lambda: ended.wait(30))
    rank_process.abandon()
    with pytest.raises(RuntimeError, match="abort-collectives of attempt 1 still runs"):
        rank_process.prepare(RankLaunch(2, 0.0))
    ended.set()
    training = threading.Thread(target=lambda: threading.Event().wait(0.2), name="TrainingThread")
    monkeypatch.setattr(rank_process, "_attempt", attempt(1))
    training.start()
    rank_process.report_end_of(training)
    with pytest.raises(RuntimeError, match="TrainingThread of attempt 1 still runs"):
        rank_process.prepare(RankLaunch(2, 0.0))


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exits of this process that were asked for, and that do not happen."""
    found: list[int] = []
    monkeypatch.setattr(rank_process, "_exit", found.append)
    monkeypatch.setattr(rank_process, "EXIT_S", 0.0)
    return found


def test_a_rank_whose_code_exits_says_where_before_it_ends(exits: list[int]) -> None:
    errors: list[BaseException] = []
    attempt = rank_process._current()
    attempt.flush = lambda: errors.append(RuntimeError("flushed"))
    begins = threading.Event()

    def code() -> None:
        begins.wait(20)
        rank_process._tell_and_exit(3)

    training = threading.Thread(target=code)
    training.start()
    rank_process.report_end_of(training, errors.append)
    waiting = Waiting()
    begins.set()
    assert waiting.ends_within(20) and waiting.has_trained
    training.join(20)
    assert exits == [3] and [type(each) for each in errors] == [RuntimeError, EndedItself]
    error = describe_error(pickle.loads(pickle.dumps(errors[1])), 1)
    assert (error.kind, error.collateral) == (ErrorKind.EXITED, False)
    assert "os._exit(3)" in error.message and "in code" in error.traceback


@pytest.mark.parametrize("case", ["main thread", "no rank", "forked", "library"])
def test_other_exits_are_at_once(case: str, exits: list[int]) -> None:
    """The main thread answers calls; what a rank forks is none."""
    errors: list[BaseException] = []
    attempt = rank_process._current()
    attempt.raise_error = None if case == "no rank" else errors.append
    attempt.pid += case == "forked"
    if case == "main thread":
        rank_process._tell_and_exit(0)
    else:
        exit_ = rank_process._tell_and_exit
        own = case != "library"
        thread = threading.Thread(target=(lambda: exit_(0)) if own else exit_, args=(0,)[own:])
        thread.start()
        thread.join(20)
    assert exits == [0] and errors == []


def connected(num_ranks: int = 1, store: dist.Store | None = None) -> Any:
    """Connections of one of so many ranks."""
    decision = GoingOver(store or dist.HashStore())
    return SimpleNamespace(decision=decision, num_ranks=num_ranks)


def following(number: int, *, accepts: int | None) -> rank_process.NextAttempt:
    """Return an offer in a process whose training thread has accepted that offer, or none."""
    rank_process._current().training = training = threading.Thread(
        target=rank_process.accept, args=(accepts,)
    )
    offer = rank_process.make_offer(number, connected())
    training.start()
    return offer


def test_whoever_decides_first_decides_for_all() -> None:
    for first in (True, False):
        decision = GoingOver(dist.HashStore())
        assert decision.make(goes=first) is first
        assert decision.make(goes=not first) is first
        assert decision.make_after(20.0) is first
        decision.await_others()  # nobody waits any more
    assert GoingOver(dist.HashStore()).make_after(0.01) is False, "nobody has decided in time"


@pytest.mark.parametrize(("accepts", "begins"), [(7, True), (None, False), (6, False)])
def test_an_attempt_begins_once_the_one_before_it_has_accepted_it(
    accepts: int | None, begins: bool
) -> None:
    offer = following(7, accepts=accepts)
    assert rank_process.open_offer() == 7
    connections = offer._connections
    assert offer.await_turn() is (connections if begins else None)
    assert connections is not None and connections.decision.make(goes=True) is begins
    offer.settle(has_begun=begins)
    assert offer.is_settled() and offer.has_begun is begins
    assert rank_process.open_offer() is None, "it is made once"


def test_ranks_go_over_once_the_last_one_has_come() -> None:
    decision = GoingOver(dist.HashStore())
    decision.come(3)
    decision.come(3)
    decision.await_others()
    assert not decision._store.check([GoingOver._KEY])
    decision.come(3)
    assert decision.make_after(0.0)


def test_ranks_stay_if_one_of_them_does_not_come_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be stopped. All would wait for it in their first collective."""
    monkeypatch.setattr(rank_process, "COMES_S", 0.05)
    offer = following(7, accepts=7)
    assert offer._connections is not None
    offer._connections.num_ranks = 2
    decision = offer._connections.decision
    assert offer.await_turn() is None
    decision.come(2)
    assert not decision.make_after(0.0), "it comes too late"


def test_a_rank_that_failed_does_not_go_over_though_others_do() -> None:
    offer = following(7, accepts=None)
    assert offer._connections is not None
    assert offer._connections.decision.make(goes=True)
    assert offer.await_turn() is None


def test_an_offer_that_is_withdrawn_after_it_was_accepted_begins_nothing() -> None:
    offer = following(7, accepts=7)
    assert offer._connections is not None
    assert offer._connections.decision.make(goes=False) is False
    assert offer.await_turn() is None


def test_an_offer_that_is_forgotten_is_not_open() -> None:
    offer = following(7, accepts=7)
    offer.forget()
    assert rank_process.open_offer() is None and offer.await_turn() is None


def test_a_process_without_an_attempt_waits_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_process, "_attempt", None)
    for goes in (True, False):
        offer, found = rank_process.make_offer(2, connected(2)), list[Any]()
        decision = offer._connections.decision  # type: ignore[union-attr]
        waiting = threading.Thread(target=lambda o=offer, f=found: f.append(o.await_turn()))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        decision.come(2) if goes else decision.make(goes=False)
        waiting.join(20)
        assert [connections is not None for connections in found] == [goes]


def test_events_of_an_offered_attempt_wait_until_the_journal_knows_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else they would close the journal for the ranks of the attempt before it."""
    reported, delivered = threading.Event(), list[str]()
    begun = rank_process._Attempt(RankLaunch(2, 0.0, is_offered=True), reported)
    monkeypatch.setattr(rank_process, "_attempt", begun)

    def deliver(source: str, events: object, stop: object) -> Any:
        delivered.append(source)

    sending = threading.Thread(target=rank_process.once_reported(deliver), args=("rank", (), None))
    sending.start()
    sending.join(0.1)
    assert delivered == []
    reported.set()
    sending.join(20)
    assert delivered == ["rank"]


def test_a_late_request_to_exit_is_none_of_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank_process.ask_to_yield(1, True)
    assert rank_process.yield_asked()
    monkeypatch.setattr(rank_process, "_attempt", attempt(2))
    rank_process.ask_to_yield(1, True)
    assert not rank_process.yield_asked()


def test_an_offer_that_is_withdrawn_while_it_connects_is_not_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trains = threading.Event()
    training = threading.Thread(target=trains.wait)
    training.start()
    monkeypatch.setattr(rank_process._current(), "training", training)
    connects, goes_on = threading.Event(), threading.Event()

    def connect(following: Any) -> Any:
        connects.set()
        assert goes_on.wait(20)
        return connected()

    monkeypatch.setattr(worker_actor, "connect", connect)
    actor = worker_actor.EverstepTrainWorker()
    following: Any = SimpleNamespace(number=3, train_fn_ref=SimpleNamespace(get=lambda: None))
    call = threading.Thread(target=actor.offer, args=(following,))
    call.start()
    assert connects.wait(20)
    actor.withdraw_offer(3)
    actor.withdraw_offer(4)  # the next one, whose call waits for this one
    goes_on.set()
    call.join(20)
    assert rank_process.open_offer() is None, "nobody follows it"
    trains.set()


def test_a_process_that_is_slower_than_others_is_polled_as_running_until_it_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The controller follows as soon as one process has gone over."""
    base = worker_actor.EverstepTrainWorker.__mro__[1]
    monkeypatch.setattr(base, "poll_status", lambda self: "of the attempt that trains here")
    actor, left = worker_actor.EverstepTrainWorker(), ["a report", "has ended"]
    assert actor.poll_status() == "of the attempt that trains here"
    actor._offer = offer = rank_process.make_offer(2, connected())
    assert actor.poll_status() == "of the attempt that trains here"
    offer.left = left
    assert [actor.poll_status() for _ in range(3)] == ["a report", "has ended", "has ended"]
    actor.note_reported()
    assert actor.poll_status().running, "and not the end of the attempt before"
    offer.settle(has_begun=True)
    assert actor.poll_status() == "of the attempt that trains here"
    actor._offer = failing = rank_process.make_offer(3, connected())
    actor.note_reported()
    failing.settle(has_begun=False, problem=RuntimeError("no memory"))
    status = actor.poll_status()
    assert not status.running and str(status.error) == "no memory"


def test_a_process_takes_no_attempt_while_an_offered_one_may_still_begin_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_actor, "SETTLES_S", 0.05)
    actor = worker_actor.EverstepTrainWorker()
    actor._offer = rank_process.make_offer(2, connected())
    with pytest.raises(RuntimeError, match="offered may still begin"):
        actor.prepare(RankLaunch(2, 0.0))


# ---------------------------------------------------------------- any order


class Member:
    """A process of a group that grows: one that trains, or one that joins."""

    def __init__(self, *, trains: bool) -> None:
        self.present: Any = None
        if trains:
            ended = SimpleNamespace(join=lambda: None)  # it is called once the thread has ended
            self.present = SimpleNamespace(training=ended, accepted=None)
        self.trains, self.lives, self.has_ended = trains, True, False
        self.answer: int | str | None = "none yet"
        self.offers: list[rank_process.NextAttempt] = []
        self.stores: dict[int, dist.Store] = {}
        self.came: dict[int, Any] = {}
        self.went: list[int] = []

    def connect(self, number: int, store: dist.Store, num_ranks: int) -> None:
        before, rank_process._attempt = rank_process._attempt, self.present
        try:
            connections = connected(num_ranks, store)
            for each in self.offers:
                each.forget()
            self.offers.append(rank_process.NextAttempt(number, connections))
        finally:
            rank_process._attempt = before
        self.stores[number] = store

    @property
    def open_offer(self) -> int | None:
        newest = self.offers[-1:]
        return newest[0].number if newest and newest[0].is_open else None

    def come(self) -> None:
        """Do what the threads of its offers do that need not wait now."""
        for offer in self.offers:
            is_open = self.stores[offer.number].check([GoingOver._DOOR])
            ready = self.has_ended if self.trains else is_open
            if ready and not offer.is_settled() and offer.number not in self.came:
                self.came[offer.number] = offer.come()

    def conclude(self, *, in_vain: bool) -> None:
        """Go over or stay, if that is decided, or if it has waited in vain."""
        for offer in self.offers:
            is_decided = in_vain or self.stores[offer.number].check([GoingOver._KEY])
            if offer.number in self.came and is_decided and not offer.is_settled():
                connections = self.came[offer.number]
                goes = connections is not None and connections.decision.make_after(0.0)
                self.went += [offer.number] * goes
                offer.settle(has_begun=goes)


class Growth(RuleBasedStateMachine):
    """A group, processes that are to join it, and their controller, whose messages come in any
    order, late, or never, while processes die, fail and are slow."""

    @initialize(trainers=st.integers(1, 3), joining=st.integers(1, 2))
    def begin(self, trainers: int, joining: int) -> None:
        self.members = [Member(trains=number < trainers) for number in range(trainers + joining)]
        self.trainers = self.members[:trainers]
        self.number, self.store = 0, None
        self.connecting: set[int] = set()
        self.verdicts: dict[int, bool] = {}
        self.agreed: int | None = None
        self.late: list[tuple[int, int]] = []

    which = st.integers(0, 4)
    seldom = st.sampled_from([False] * 7 + [True])

    def member(self, which: int) -> Member:
        return self.members[which % len(self.members)]

    @precondition(lambda self: self.store is None and not any(self.verdicts.values()))
    @rule()
    def offer(self) -> None:
        self.number, self.store = self.number + 1, dist.HashStore()
        self.newest = self.store
        self.connecting = set(range(len(self.members)))

    @rule(whiches=st.lists(which, min_size=5, max_size=40))
    def go_on(self, whiches: list[int]) -> None:
        """Each in turn does what comes next for it."""
        for which in whiches:
            which %= len(self.members)
            found = self.members[which]
            if found.lives and which in self.connecting:
                self.connect(which)
            elif found.lives and found.trains and found.answer == "none yet":
                self.come_to_the_agreed_step(found)
            elif found.lives and found.trains and not found.has_ended:
                found.has_ended = found.answer is None or self.agreed is not None
            elif found.lives:
                found.come()
                found.conclude(in_vain=False)

    def connect(self, which: int) -> None:
        """Also too late: the controller may have withdrawn the offer meanwhile."""
        self.connecting.remove(which)
        self.members[which].connect(self.number, self.newest, len(self.members))

    @precondition(lambda self: self.store is not None)
    @rule(happens=seldom)
    def look(self, happens: bool) -> None:
        """The controller gives an offer up, or has seen that ranks have left or failed."""
        if happens:
            self.settle()

    def settle(self) -> None:
        verdict = self.verdicts[self.number] = GoingOver(self.store).make_after(0.0)
        if not verdict:
            self.late += [(which, self.number) for which in range(len(self.members))]
            self.store = None

    @precondition(lambda self: self.late)
    @rule(which=which)
    def hear_of_the_withdrawal(self, which: int) -> None:
        which, number = self.late.pop(which % len(self.late))
        for offer in self.members[which].offers:
            if offer.number == number:
                offer.forget()

    def come_to_the_agreed_step(self, found: Member) -> None:
        found.answer = found.open_offer
        answers = [each.answer for each in self.trainers]
        whole = all(each.lives and not each.has_ended for each in self.trainers)
        if "none yet" not in answers and whole:
            self.agreed = agreed_offer(answers)  # type: ignore[arg-type]
            for each in self.trainers:
                each.present.accepted = self.agreed

    @rule(which=which, happens=seldom)
    def come_early(self, which: int, happens: bool) -> None:
        found = self.member(which)
        if happens and found.trains and found.lives and found.answer == "none yet":
            self.come_to_the_agreed_step(found)

    @rule(which=which, happens=seldom)
    def fail(self, which: int, happens: bool) -> None:
        found = self.member(which)
        if happens and found.trains and found.lives and not found.has_ended:
            found.present.accepted, found.has_ended = None, True

    @rule(which=which, happens=seldom)
    def wait_in_vain(self, which: int, happens: bool) -> None:
        if happens and self.member(which).lives:
            self.member(which).conclude(in_vain=True)

    @rule(which=which, happens=seldom)
    def die(self, which: int, happens: bool) -> None:
        self.member(which).lives &= not happens

    @invariant()
    def nobody_goes_alone(self) -> None:
        went = {number for each in self.members for number in each.went}
        assert len(went) <= 1 and went <= {self.agreed}, "only where all ranks have agreed on it"
        assert all(self.verdicts.get(number, True) for number in went), "and the controller knows"
        accepted = [each.present.accepted for each in self.trainers if each.went]
        assert set(accepted) <= went, "nobody goes who has failed"

    def teardown(self) -> None:
        """All come to rest, and agree."""
        if not hasattr(self, "members"):
            return
        if self.store is not None:
            self.settle()
        self.nobody_goes_alone()
        for each in self.members:
            each.has_ended = True
            if each.lives:
                each.come()
                each.conclude(in_vain=True)
                assert all(offer.is_settled() for offer in each.offers), "nobody waits for ever"
        self.nobody_goes_alone()
        if self.verdicts.get(self.number):
            living = [each for each in self.members if each.lives]
            assert all(each.went == [self.number] for each in living), "all go, or nobody"


TestGrowth = Growth.TestCase
