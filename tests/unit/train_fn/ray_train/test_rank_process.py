"""What a rank tells the controller by itself, so that it need not be asked often."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from everstep.wire import ErrorKind
from train_fn.errors import EndedItself
from train_fn.ray_train import rank_process
from train_fn.recovery.evidence import describe_error
from train_fn.recovery.launch import RankLaunch


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


def test_a_late_request_to_exit_is_none_of_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank_process.ask_to_yield(1, True)
    assert rank_process.yield_asked()
    monkeypatch.setattr(rank_process, "_attempt", attempt(2))
    rank_process.ask_to_yield(1, True)
    assert not rank_process.yield_asked()
