"""A host between attempts: who lends a state lives until all have it, and news are told once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from train_fn.ray_train import worker_actor
from train_fn.ray_train.worker_actor import EverstepTrainWorker
from train_fn.recovery.launch import RankLaunch


class Rank:
    """A rank's process, and what its host did with it."""

    how = "built"

    def __init__(self, number: int) -> None:
        self.pid, self.did = 100 + number, list[str]()

    def call(self, name: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        self.did.append(name)

    def kill(self) -> None:
        self.did.append("killed")

    def close(self) -> None:
        self.did.append("closed")


class Host:
    """A host whose ranks are forked nowhere."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranks: list[Rank] = []
        monkeypatch.setattr(worker_actor.ray, "get_gpu_ids", list)
        monkeypatch.setattr(worker_actor.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
        context = SimpleNamespace(get_node_id=lambda: "node")
        monkeypatch.setattr(worker_actor.ray, "get_runtime_context", lambda: context)
        made = self.made = EverstepTrainWorker.__new__(EverstepTrainWorker)
        made._rank = made._lender = made._lends = None
        made._versions, made._told, made._remembered = {}, worker_actor._Told(), {}
        made._zygotes = SimpleNamespace(fork=self._fork, why_not=None)  # type: ignore[assignment]

    def _fork(self, facts: Any, serve: Any) -> Rank:
        self.facts = facts
        self.ranks.append(Rank(len(self.ranks)))
        return self.ranks[-1]

    def begin(self) -> None:
        job: Any = SimpleNamespace(calls_ray=False)
        self.made.prepare(RankLaunch(len(self.ranks) + 1, 0.0), job)

    def tell(self, what: str, *facts: Any) -> None:
        """Be told by the present rank."""
        self.made._serve("note", (what, facts))

    @property
    def is_closed(self) -> list[bool]:
        return ["closed" in rank.did for rank in self.ranks]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host(monkeypatch)
    made.begin()
    return made


def test_a_rank_that_lends_lives_until_all_have_its_state(host: Host) -> None:
    host.tell("lends", 7)
    host.made.release()
    host.begin()
    assert host.is_closed == [False, False]
    host.tell("restored")
    assert host.is_closed == [True, False]
    host.made.release()
    assert host.is_closed == [True, True]


def test_attempts_that_fail_before_all_have_it_leave_it_where_it_is(host: Host) -> None:
    host.tell("lends", 7)
    for number in (1, 2, 3):
        host.begin()
        assert host.is_closed == [False, *[True] * (number - 1), False]
    host.tell("restored")
    assert host.is_closed == [True] * 3 + [False]


def test_of_two_that_lend_the_later_one_is_kept(host: Host) -> None:
    """It has restored, and some other rank has not."""
    host.tell("lends", 7)
    host.begin()
    host.tell("lends", 7)
    host.begin()
    assert host.is_closed == [True, False, False]


@pytest.mark.parametrize("begins_again", [False, True])
def test_a_host_that_is_to_end_has_its_lender_write(begins_again: bool, host: Host) -> None:
    assert host.made.leave_kept_state() is None
    assert host.ranks[0].did == [], "it lends nothing"
    host.tell("lends", 7)
    if begins_again:
        host.begin()
    host.made.leave_kept_state()
    assert [rank.did for rank in host.ranks] == [["leave_kept_state"], []][: len(host.ranks)]


def test_what_a_rank_has_counted_no_later_one_counts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    host.begin()
    assert not host.facts.remembered
    host.tell("remember", "flops", 3.5e6)
    host.begin()
    assert host.facts.remembered == {"flops": 3.5e6}
