"""How a rank lets go of its peers, how it exits, and what it is asked to."""

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
from train_fn.ranks import process
from train_fn.recovery.evidence import describe_error
from train_fn.recovery.launch import RankLaunch


def attempt(number: int) -> process._Attempt:
    return process._Attempt(RankLaunch(number, 0.0))


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_attempt", attempt(1))


def test_a_rank_that_lets_go_answers_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort may take long; its rank must not be taken for stopped."""
    begun, ended = threading.Event(), threading.Event()

    def abort() -> None:
        begun.set()
        ended.wait(30)

    monkeypatch.setattr(process, "abort_collectives", abort)
    process.abandon()
    assert begun.wait(10), "in a thread of its own"
    ended.set()


def _wait_for_a_peer_that_lives(rank: int, address: str, results: Any) -> None:
    """Rank 0 waits in a collective that its peer never enters, and is given up."""
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        threading.Event().wait(60)
    process._attempt = attempt(1)

    def train() -> None:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as exc:
            results.send(describe_error(exc, 0).collateral)

    group = dist.group.WORLD
    training = threading.Thread(target=train)
    training.start()
    process._current().training = training
    process.abandon()
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


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exits of this process that were asked for, and that do not happen."""
    found: list[int] = []
    monkeypatch.setattr(process, "_exit", found.append)
    monkeypatch.setattr(process, "EXIT_S", 0.0)
    return found


def test_a_rank_whose_code_exits_says_where_before_it_ends(exits: list[int]) -> None:
    told: list[Any] = []
    process._current().flush = lambda: told.append("flushed")

    def code() -> None:
        process.tell_host(lambda *facts: told.append(facts))
        process._tell_and_exit(3)

    training = threading.Thread(target=code)
    training.start()
    training.join(20)
    assert exits == [3]
    [flushed, (name, found)] = told
    assert (flushed, name) == ("flushed", "raise_error")
    error = describe_error(pickle.loads(pickle.dumps(found)), 1)
    assert (error.kind, error.collateral) == (ErrorKind.EXITED, False)
    assert "os._exit(3)" in error.message and "in code" in error.traceback


@pytest.mark.parametrize("case", ["no rank", "forked", "library"])
def test_other_exits_are_at_once(case: str, exits: list[int]) -> None:
    """What a rank forks is none."""
    errors: list[BaseException] = []
    attempt = process._current()
    attempt.raise_error = None if case == "no rank" else errors.append
    attempt.pid += case == "forked"
    exit_ = process._tell_and_exit
    own = case != "library"
    thread = threading.Thread(target=(lambda: exit_(0)) if own else exit_, args=(0,)[own:])
    thread.start()
    thread.join(20)
    assert exits == [0] and errors == []


def test_a_late_request_to_exit_is_none_of_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process.ask_to_yield(1, True)
    assert process.yield_asked()
    monkeypatch.setattr(process, "_attempt", attempt(2))
    process.ask_to_yield(1, True)
    assert not process.yield_asked()
