"""Collectives that fail as NCCL's do: they hang until somebody aborts them, and what they leave
then is not believed."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.silent_backend import SilentOptions, claim_cpu
from train_fn.errors import PeersGone
from train_fn.step import nccl
from train_fn.step.peers import Peers, end_process_group

pytestmark = pytest.mark.own_process
CPU = torch.device("cpu")


def alone_of_two(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Peers:
    """Rank 0 of two whose peer never comes."""
    for name, value in SilentOptions(**options).env().items():
        monkeypatch.setenv(name, value)
    claim_cpu()
    nccl.begin_attempt()
    monkeypatch.setattr(nccl, "_have_met", True)  # it came to the first collective, and then left
    dist.init_process_group(nccl.group_backend(CPU), store=dist.HashStore(), rank=0, world_size=2)
    return Peers(0, 2, CPU)


def abort_soon() -> threading.Thread:
    thread = threading.Timer(0.2, nccl.abort_collectives)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "call",
    [
        lambda peers: peers.gather({"a": 1}),
        lambda peers: peers.share({"a": 1}, 0),
        lambda peers: peers.share(None, 1),
    ],
    ids=["gather", "send", "receive"],
)
def test_nothing_is_unpickled_that_did_not_arrive(
    call: Callable[[Peers], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = alone_of_two(monkeypatch)

    def refuse(*_: object) -> None:
        raise AssertionError("unpickled what an aborted collective left")

    monkeypatch.setattr(pickle, "loads", refuse)
    thread = abort_soon()
    with pytest.raises(PeersGone, match="silent was aborted"):
        call(peers)
    thread.join()
    end_process_group()


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_sum_that_was_aborted_is_garbage_without_an_error(
    monkeypatch: pytest.MonkeyPatch, run_ahead: bool
) -> None:
    peers = alone_of_two(monkeypatch, run_ahead=run_ahead)
    numbers = torch.ones(4)
    work = peers.start_sum(numbers)
    assert work is not None
    thread = abort_soon()
    work.wait()
    with pytest.raises(PeersGone):
        peers.result(numbers)
    assert numbers.tolist() == [0.625, 0.625, 1, 1]
    with pytest.raises(PeersGone, match="before this collective"):
        peers.start_sum(numbers)
    thread.join()


def test_an_abort_may_take_long_and_its_flag_is_up_before_anything_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peers = alone_of_two(monkeypatch, abort_s=0.5)
    work = peers.start_sum(torch.ones(4))
    assert work is not None
    thread, began = abort_soon(), time.monotonic()
    work.wait()
    assert time.monotonic() - began >= 0.5
    with pytest.raises(PeersGone):
        peers.require_whole()
    thread.join()


def test_an_abort_that_hangs_holds_up_neither_who_lets_go_nor_who_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl, "ABORT_S", 0.2)
    alone_of_two(monkeypatch, abort_s=3600)
    kept: list[bool] = []
    nccl.keep_before_abort(lambda: kept.append(nccl._aborted.is_set()))
    began = time.monotonic()
    nccl.abort_collectives()
    assert kept == [True], "no step passes its gate any more, and the state is kept first"
    end_process_group()
    assert time.monotonic() - began < 5


def test_a_state_that_cannot_be_kept_does_not_stop_the_abort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peers = alone_of_two(monkeypatch)
    work = peers.start_sum(torch.ones(4))
    assert work is not None

    def fail() -> None:
        raise OSError("no room")

    nccl.keep_before_abort(fail)
    nccl.abort_collectives()
    work.wait()


def test_the_path_is_chosen_by_what_the_backend_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nccl.fails_by_itself(), "without a group nothing fails"
    assert nccl.group_backend(CPU) == "gloo"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert nccl.fails_by_itself()
    end_process_group()
    alone_of_two(monkeypatch)
    assert nccl.group_backend(CPU) == "silent"
    assert not nccl.fails_by_itself()
    end_process_group()
    assert not dist.is_initialized()
