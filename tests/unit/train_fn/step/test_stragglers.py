"""Who holds the others up: the clock of a rank, the comparison of ranks, and what the API tells of
them."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.wire import StragglerReport
from everstep.wire.events import EventKind
from tests.support.api_service import ApiService
from train_fn.step import timing as stragglers
from train_fn.step.peers import Peers
from train_fn.step.report import Votes
from train_fn.step.report_sums import ReportSums
from train_fn.step.timing import StepClock, StragglerWatch

CPU = torch.device("cpu")


class Watched:
    """A watch over ranks whose times a test sets; its clock goes with the steps."""

    def __init__(self, shares: list[int], *, by_speed: bool = False) -> None:
        self.now, self.step = 0.0, 0
        self.events: list[tuple[EventKind, dict[str, Any]]] = []
        nodes = [f"node-{rank}" for rank in range(len(shares))]
        self.watch = StragglerWatch(
            lambda kind, data: self.events.append((kind, data)),
            nodes,
            shares,
            lambda: self.now,
            by_speed=by_speed,
        )

    def train(self, seconds: float, *own_s: float) -> None:
        end = self.now + seconds
        while self.now < end:
            step_s = max(own_s) + 0.002
            self.now += step_s
            self.step += 1
            self.watch.note(self.step, own_s, step_s)

    @property
    def stragglers(self) -> list[tuple[int, str, bool]]:
        return [
            (data["rank"], data["node_id"], data["slow"])
            for kind, data in self.events
            if kind is EventKind.STRAGGLER
        ]

    @property
    def times(self) -> list[dict[str, Any]]:
        return [data for kind, data in self.events if kind is EventKind.RANK_TIMES]


@given(st.lists(st.floats(0.0, 9.0), min_size=2, max_size=20))
def test_each_rank_is_compared_with_the_median_of_all_others(values: list[float]) -> None:
    assert stragglers.medians_of_others(values) == [
        median(values[:place] + values[place + 1 :]) for place in range(len(values))
    ]


def test_a_rank_that_takes_50_ms_longer_is_named_until_it_does_no_more() -> None:
    ranks = Watched([1, 1, 1])
    ranks.train(20, 0.013, 0.014, 0.013)
    assert ranks.stragglers == [] and len(ranks.times) == 1
    ranks.train(2 * stragglers.WINDOW_S, 0.013, 0.063, 0.013)
    assert ranks.stragglers == [], "a slow moment is no straggler"
    ranks.train(55, 0.013, 0.063, 0.013)
    assert ranks.stragglers == [(1, "node-1", True)]
    slow = ranks.times[-1]["ranks"]
    assert slow[1]["skew"] == pytest.approx(0.063 / 0.013, rel=0.01)
    assert [rank["wait_s"] for rank in slow] == pytest.approx([0.052, 0.002, 0.052], abs=1e-4)
    ranks.train(70, 0.013, 0.014, 0.013)
    assert ranks.stragglers == [(1, "node-1", True), (1, "node-1", False)]
    ranks.train(200, 0.040, 0.055, 0.040)
    assert len(ranks.stragglers) == 2, "below 1.5 times nobody is warned"
    assert len(ranks.times) <= 9, "told by the minute, and when something changes"


def test_a_larger_share_is_no_slowness() -> None:
    ranks = Watched([2, 1, 1])
    ranks.train(60, 0.040, 0.020, 0.021)
    assert ranks.stragglers == []
    assert ranks.times[0]["ranks"][0]["skew"] == pytest.approx(1, rel=0.05)


def test_a_rank_whose_slowness_shares_by_speed_make_up_for_is_no_straggler() -> None:
    """Before and after they follow; but it is one if a single micro-batch holds its peers up."""
    ranks = Watched([4, 4, 4], by_speed=True)
    ranks.train(70, 0.04, 0.04, 0.12)
    ranks.watch.divide_anew([5, 5, 2])
    ranks.train(70, 0.05, 0.05, 0.06)
    assert ranks.stragglers == []
    assert all(rank["skew"] < 1.5 for times in ranks.times for rank in times["ranks"])
    ranks.watch.divide_anew([6, 5, 1])
    ranks.train(70, 0.06, 0.05, 0.1)
    assert ranks.stragglers == [(2, "node-2", True)]
    equal = Watched([4, 4, 4])
    equal.train(70, 0.04, 0.04, 0.12)
    assert equal.stragglers == [(2, "node-2", True)]


def test_checkpoints_now_and_then_and_steps_without_times_make_no_straggler() -> None:
    ranks = Watched([1, 1])
    for _ in range(300):
        ranks.train(0.1, 0.02, 0.02)
        ranks.train(0.3, 0.3, 0.02)
        ranks.watch.note(ranks.step, (0.0, 0.0), 5.0)
        ranks.train(0.2, 0.02, 0.02)
    assert ranks.stragglers == []


def test_own_time_ends_with_the_last_gradient() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    clock = StepClock(list(layers.parameters()), CPU)
    began = time.perf_counter()
    assert clock.gate() == 0, "nothing is known before the first gate"
    layers(torch.ones(2, 4)).sum().backward()
    worked_s = time.perf_counter() - began
    time.sleep(0.03)  # the others are slower: this is no work of ours
    assert 0 < clock.gate() <= worked_s
    time.sleep(0.03)  # data that is late, say
    layers(torch.ones(2, 4)).sum().backward()
    assert clock.gate() >= 0.03
    clock.restart()
    layers(torch.ones(2, 4)).sum().backward()
    assert clock.gate() == 0, "an evaluation came between"


def test_every_rank_s_time_travels_with_the_totals() -> None:
    peers = Peers(1, 3, CPU)
    report = ReportSums(peers)
    report.add(torch.tensor(1.0), 1)
    gradient = report.gradient(Votes(own_s=0.25))
    assert report.totals_of((gradient / 3).numpy().data).own_s == (0.0, 0.25, 0.0)


async def test_the_api_tells_times_by_rank_and_node_and_who_was_slow(api: ApiService) -> None:
    run_id, journal = await api.running()
    empty = StragglerReport.model_validate(await api.get(f"/v1/runs/{run_id}/stragglers"))
    assert (empty.at, empty.ranks, empty.nodes, empty.stragglers) == (None, (), (), ())
    rank = {"micro_batches": 1, "own_s": 0.01, "wait_s": 0.05, "skew": 0.2}
    ranks = [
        {"rank": 0, "node_id": "a", **rank},
        {"rank": 1, "node_id": "a", **rank},
        {"rank": 2, "node_id": "b", **rank, "own_s": 0.06, "wait_s": 0.0, "skew": 6.0},
    ]
    slow = {"rank": 2, "node_id": "b", "step": 9, "own_s": 0.06, "peers_s": 0.01, "skew": 6.0}
    at = api.clock.now
    api.apply(
        run_id,
        [
            journal.event(EventKind.STRAGGLER, at=at + 1, **slow, slow=True),
            journal.event(EventKind.RANK_TIMES, at=at + 1, step=8, step_s=0.06, ranks=ranks[:1]),
            journal.event(EventKind.STRAGGLER, at=at + 20, **slow, slow=False),
            journal.event(EventKind.STRAGGLER, at=at + 30, **slow, slow=True),
            journal.event(EventKind.RANK_TIMES, at=at + 30, step=9, step_s=0.06, ranks=ranks),
        ],
    )
    report = StragglerReport.model_validate(await api.get(f"/v1/runs/{run_id}/stragglers"))
    assert (report.step, report.attempt, [each.rank for each in report.ranks]) == (9, 1, [0, 1, 2])
    assert [(node.node_id, node.ranks, node.own_s) for node in report.nodes] == [
        ("a", (0, 1), 0.01),
        ("b", (2,), 0.06),
    ]
    first, second = report.stragglers
    assert first.ended_at is not None and (first.ended_at - first.at).total_seconds() == 19
    assert second.ended_at is None
    api.apply(
        run_id, [journal.event(EventKind.ATTEMPT_ENDED, at=at + 40, cause="resized", last_step=9)]
    )
    report = StragglerReport.model_validate(await api.get(f"/v1/runs/{run_id}/stragglers"))
    assert all(each.ended_at is not None for each in report.stragglers), "it ends with its attempt"


async def test_what_each_rank_s_gpu_told_last_is_shown(api: ApiService) -> None:
    run_id, journal = await api.running()
    use = {
        "node_id": "a",
        "name": "H200",
        "busy": 0.9,
        "used_bytes": 7,
        "total_bytes": 10,
        "allocated_bytes": 5,
        "seconds": 60.0,
    }
    events = [
        journal.event(EventKind.GPU_USE, rank=rank, **{**use, "busy": busy})
        for rank, busy in ((1, 0.1), (0, 0.9), (1, None))
    ]
    api.apply(run_id, events)
    report = StragglerReport.model_validate(await api.get(f"/v1/runs/{run_id}/stragglers"))
    assert [(gpu.rank, gpu.busy, gpu.used_bytes) for gpu in report.gpus] == [
        (0, 0.9, 7),
        (1, None, 7),
    ]
    journal.attempt += 1
    api.apply(
        run_id, [*journal.start(world_size=1), journal.event(EventKind.GPU_USE, rank=0, **use)]
    )
    report = StragglerReport.model_validate(await api.get(f"/v1/runs/{run_id}/stragglers"))
    assert [gpu.rank for gpu in report.gpus] == [0], "of the newest attempt only"
