"""Rows and events that projections are tried on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from everstep.spec.parsing import parse_spec
from everstep.wire import RunStatus
from everstep.wire.events import EventKind
from service.db.runs import new_row
from service.model.rows import EventRow
from service.model.run_rows import RunRow
from tests.support.api_service import NOON, spec


def run_row(status: RunStatus = RunStatus.RUNNING, **fields: Any) -> RunRow:
    wanted = parse_spec(spec(checkpoint={"best_metric": "accuracy"}, train={"epochs": 3}))
    return replace(
        new_row("run_000000000001", wanted, "tok", NOON), status=status, submission=1, **fields
    )


def event(
    kind: str, seq: int = 1, *, at: float = NOON, submission: int = 1, attempt: int = 1, **data: Any
) -> EventRow:
    return EventRow(seq, at, kind, submission, attempt, data)


WORKERS = [{"rank": 0, "node_id": "n1", "node_ip": "10.0.0.1", "pid": 7}]


def committed(step: int, submission: int = 1, at: float = NOON) -> EventRow:
    name = f"step-{step:09d}.s{submission:03d}.a001"
    return event(
        EventKind.CHECKPOINT_COMMITTED,
        at=at,
        submission=submission,
        step=step,
        epoch=0,
        name=name,
        size_bytes=step,
        digest="d" * 64,
        metrics={"accuracy": step / 100},
    )
