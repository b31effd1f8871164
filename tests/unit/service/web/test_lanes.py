"""What every rank did over time, and where curves are marked."""

from __future__ import annotations

from typing import Any

from everstep.wire.events import EventKind
from service.model.rows import EventRow
from service.web.run_page import Fault, lanes


def history(*entries: tuple[float, EventKind, int, dict[str, Any]]) -> list[EventRow]:
    return [
        EventRow(seq, at, kind, 1, attempt, data)
        for seq, (at, kind, attempt, data) in enumerate(entries, 1)
    ]


def workers(*ranks: int) -> dict[str, Any]:
    return {
        "workers": [{"rank": rank, "node_id": f"node-{rank}"} for rank in ranks],
        "world_size": len(ranks),
    }


def test_a_failure_stops_every_rank_when_it_happened_and_blames_the_first() -> None:
    found = lanes(
        history(
            (10, EventKind.ATTEMPT_STARTED, 1, workers(0, 1)),
            (12, EventKind.TRAINING_STARTED, 1, {}),
            (20, EventKind.FAILURE, 1, {"first_rank": 1, "verdict": "node_lost", "detect_s": 2.0}),
            (21, EventKind.ATTEMPT_ENDED, 1, {"cause": "node_lost"}),
            (25, EventKind.ATTEMPT_STARTED, 2, workers(0)),
            (26, EventKind.TRAINING_STARTED, 2, {}),
        ),
        now=30,
    )
    assert found is not None
    first = [("starting", 10, 12), ("training", 12, 18), ("waiting", 18, 21)]
    second = [("starting", 25, 26), ("training", 26, 30)]
    spans = [
        [(part.activity, part.start, part.end) for part in lane.segments] for lane in found.lanes
    ]
    assert spans == [first + second, first]
    assert [lane.faults for lane in found.lanes] == [[], [Fault(18, "node_lost")]]
    assert (found.start, found.end, found.position(20)) == (10, 30, 50)


def test_a_group_whose_driver_died_ends_where_the_next_begins_and_finished_ones_stay() -> None:
    entries = [
        (10.0, EventKind.ATTEMPT_STARTED, 1, workers(0)),
        (15.0, EventKind.SUBMISSION_STARTED, 0, {}),
        (20.0, EventKind.ATTEMPT_STARTED, 2, workers(0)),
        (30.0, EventKind.FINISHED, 2, {"outcome": "succeeded"}),
        (30.1, EventKind.STATUS, 0, {"to": "SUCCEEDED"}),
    ]
    found = lanes(history(*entries), now=1000)
    assert found is not None and found.end == 30
    assert [(part.start, part.end) for part in found.lanes[0].segments] == [(10, 15), (20, 30)]
    assert lanes([], now=5) is None
