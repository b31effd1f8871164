"""The row and the first transition of a new run."""

from __future__ import annotations

from everstep.spec.run_spec import RunSpec
from everstep.wire.replays import Replay
from service.model.rows import TransitionRow
from service.model.run_rows import RunRow
from service.projections.goodput import TimeLedger
from service.projections.work import WorkLedger


def new_row(
    run_id: str,
    spec: RunSpec,
    created_by: str,
    now: float,
    sweep_id: str | None = None,
    owner: str | None = None,
) -> RunRow:
    """Return the row of a new run, which the token ``created_by`` of ``owner`` submits."""
    return RunRow(
        id=run_id,
        name=spec.name,
        project=spec.project,
        priority=spec.priority,
        tags=dict(spec.tags),
        spec=spec.model_dump(mode="json"),
        created_by=created_by,
        sweep_id=sweep_id,
        owner=owner,
        time_ledger=TimeLedger.begin(now).dump(),
        work_ledger=WorkLedger.begin(spec.scaling, now).dump(),
        replay_of=None
        if spec.replay is None
        else Replay(
            run_id=spec.replay.run_id,
            from_step=spec.replay.from_step,
            to_step=spec.replay.to_step,
        ).model_dump(mode="json"),
        replayed_run=None if spec.replay is None else spec.replay.run_id,
        created_at=now,
        updated_at=now,
    )


def first_transition(run: RunRow) -> TransitionRow:
    """Return the only transition of a new run."""
    return TransitionRow(run.id, run.last_seq, None, run.status.value, run.created_at, None, None)
