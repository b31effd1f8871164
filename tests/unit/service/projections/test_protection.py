"""What each death would cost a run, by what rank 0 reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstep.wire import RunStatus
from everstep.wire.events import EventKind
from service.projections.handlers import project
from service.projections.protection import protection
from tests.support.api_service import NOON
from tests.support.projected_events import WORKERS, event, run_row


def test_protection() -> None:
    run = run_row(step=15, latest_checkpoint={"step": 10, "committed_at": NOON, "size_bytes": 1})
    assert protection(run).model_dump() == {
        "survives": ("rank", "node", "driver"),
        "worst_case_steps_lost": 5,
        "process_loss": None,
        "node_loss": None,
        "message": "No rank trains now.",
    }
    assert protection(run_row(step=15)).worst_case_steps_lost == 15
    ended = protection(replace(run, status=RunStatus.SUCCEEDED))
    assert (ended.survives, ended.worst_case_steps_lost, ended.process_loss) == ((), 0, None)


@pytest.mark.parametrize(
    ("snapshots", "process_loss", "node_loss", "said"),
    [
        ("survivors", "no_steps", "no_steps", "ranks on other nodes keep the state"),
        ("every_n", "no_steps", "few_steps", "fewer than the number in train.heirs"),
        ("own_node", "no_steps", "checkpoint", "nothing is copied to other nodes"),
        ("published", "few_steps", "checkpoint", "All ranks run on one node"),
        ("none", "checkpoint", "checkpoint", "no node keeps the state"),
        (None, "checkpoint", "checkpoint", "no node keeps the state"),
    ],
)
def test_protection_says_what_each_death_would_cost(
    snapshots: str | None, process_loss: str, node_loss: str, said: str
) -> None:
    found = protection(run_row(workers=WORKERS, snapshots=snapshots))
    assert (found.process_loss, found.node_loss) == (process_loss, node_loss)
    assert found.message is not None and said in found.message
    spec_without = {
        **run_row().spec,
        "recovery": {**run_row().spec["recovery"], "max_system_failures": 0},
    }
    fragile = protection(run_row(workers=WORKERS, snapshots=snapshots, spec=spec_without))
    assert (fragile.survives, fragile.process_loss, fragile.node_loss) == (("driver",), None, None)


def test_protection_follows_what_rank_0_reports() -> None:
    run = run_row(attempt=1, workers=WORKERS, snapshots="published")
    changed = project(
        run, event(EventKind.SNAPSHOTS, step=5, snapshots="none", problem="does not fit")
    )
    assert changed.columns == {"snapshots": "none"}
    again = project(run, event(EventKind.ATTEMPT_STARTED, attempt=2, world_size=1, workers=WORKERS))
    assert again.columns["snapshots"] is None, "the next attempt may run elsewhere"
    assert (
        project(run, event(EventKind.TRAINING_STARTED, snapshots="survivors")).columns["snapshots"]
        == "survivors"
    )
