"""A host between attempts: its rank ends, and what that one has found out stays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from train_fn.ray_train import worker_actor
from train_fn.ray_train.worker_actor import EverstepTrainWorker
from train_fn.recovery.launch import RankLaunch


class Rank:
    """A rank's process, and what its host did with it."""

    def __init__(self, number: int) -> None:
        self.pid, self.did = 100 + number, list[str]()

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
        made._rank = None
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


def test_a_rank_ends_before_the_next_one_begins(host: Host) -> None:
    host.begin()
    assert host.is_closed == [True, False]
    host.made.release()
    assert host.is_closed == [True, True]


def test_what_a_rank_has_counted_no_later_one_counts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    host.begin()
    assert not host.facts.remembered
    host.tell("remember", "flops", 3.5e6)
    host.begin()
    assert host.facts.remembered == {"flops": 3.5e6}
