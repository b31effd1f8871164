"""What is reported of ranks that were killed because they hung."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from everstep.wire import Verdict
from train_fn.ray_train.group import patience
from train_fn.ray_train.group.patience import HungRanks
from train_fn.recovery.evidence import Evidence, RankReport
from train_fn.recovery.hang import CollectiveCounts
from train_fn.recovery.settings import RecoverySettings
from train_fn.recovery.verdict import judge


@pytest.mark.parametrize(
    ("node_alive", "verdict"), [(True, Verdict.HANG), (False, Verdict.NODE_LOST)]
)
def test_a_rank_that_was_killed_for_a_hang_on_a_node_that_does_not_answer_is_a_lost_node(
    node_alive: bool, verdict: Verdict
) -> None:
    """A host that is cut off: nobody knows whether its rank hung, or was killed at all."""
    why = "set recovery.hang_timeout_s to more"
    hung = HungRanks(RecoverySettings().health_timeout_s)
    hung._ranks, hung._stacks, hung._reason = [1], {0: "waits", 1: None}, why
    killed = RankReport(1, "b", 101, died=True, death="killed by ray.kill", node_alive=node_alive)
    ranks = (RankReport(0, "a", 100), hung.explain(killed))
    judgement = judge(Evidence(attempt=1, noticed_at=50.0, ranks=ranks))
    assert (judgement.verdict, judgement.first_rank) == (verdict, 1)
    assert judgement.exception == (why if node_alive else None)
    assert "death" not in judgement.detail


WAITS = 'File "/x/torch/distributed/distributed_c10d.py", line 3025'


class Rank:
    """A worker that tells its stack and its counts; None does not answer."""

    def __init__(self, stack: str | None, enqueued: int | None) -> None:
        self.asked: list[str] = []
        counts = None if enqueued is None else CollectiveCounts(enqueued)
        self.actor = SimpleNamespace(
            stack=self._call("stack", stack), collective_counts=self._call("counts", counts)
        )

    def _call(self, name: str, answer: Any) -> Any:
        def remote() -> Any:
            self.asked.append(name)
            return _Ref(answer)

        return SimpleNamespace(remote=remote)


class _Ref:
    def __init__(self, answer: Any) -> None:
        self.answer = answer


def killed(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], HungRanks]:
    """Break a hang of these ranks. Return who was killed."""
    found: list[int] = []
    places = {id(rank.actor): number for number, rank in enumerate(ranks)}
    stand_in = SimpleNamespace(
        wait=lambda refs, num_returns, timeout: (
            [ref for ref in refs if ref.answer is not None],
            [ref for ref in refs if ref.answer is None],
        ),
        get=lambda ref: ref.answer,
    )
    monkeypatch.setattr(patience, "ray", stand_in)
    hung = HungRanks(60.0)
    ended = hung.kill(ranks, "no sign of life", lambda actor: found.append(places[id(actor)]))
    assert ended == found
    return found, hung


def judged(hung: HungRanks, victims: list[int], count: int) -> Any:
    reports = [
        RankReport(rank, f"n{rank}", 1, died=rank in victims, held_up=True, still_running=True)
        for rank in range(count)
    ]
    return judge(Evidence(1, 50.0, tuple(map(hung.explain, reports))))


def test_the_rank_that_did_not_come_is_named_where_all_stacks_look_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    victims, hung = killed([Rank(WAITS, 41), Rank(WAITS, 40), Rank(WAITS, 41)], monkeypatch)
    assert victims == [1], "and not the last"
    judgement = judged(hung, victims, 3)
    assert (judgement.verdict, judgement.first_rank, judgement.node_id) == (Verdict.HANG, 1, "n1")
    assert "did not enter the collective" in judgement.exception


@pytest.mark.parametrize("counts", [(41, 41, 41), (41, None, 40)])
def test_without_counts_that_tell_nobody_is_named(
    counts: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    victims, hung = killed([Rank(WAITS, each) for each in counts], monkeypatch)
    assert victims == [2]
    judgement = judged(hung, victims, 3)
    assert (judgement.verdict, judgement.first_rank, judgement.node_id) == (
        Verdict.HANG,
        None,
        None,
    )
    assert judgement.exception == "no sign of life"
