"""Replace the tables of sweeps by tags of their runs"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

REASONS = {"paused_by_sweep": "paused_by_user", "cancelled_by_sweep": "cancelled_by_user"}
"""Reason codes that are no more, and what a reader gets for them. Their messages name the sweep."""


def upgrade() -> None:
    connection = op.get_bind()
    tables = sa.MetaData()
    names = ("runs", "run_tags", "sweep_runs", "transitions", "events")
    tables.reflect(connection, only=names)
    runs, run_tags, sweep_runs, transitions, events = (tables.tables[name] for name in names)
    found = (
        sa.select(runs.c.id, runs.c.sweep_id, runs.c.tags, sweep_runs.c.number)
        .outerjoin(sweep_runs, sweep_runs.c.run_id == runs.c.id)
        .where(runs.c.sweep_id.is_not(None))
    )
    for run in connection.execute(found).all():
        own = {"study": run.sweep_id, "trial": None if run.number is None else str(run.number)}
        tags = {
            key if key not in run.tags else f"everstep.{key}": value
            for key, value in own.items()
            if value is not None
        }
        connection.execute(
            sa.update(runs)
            .where(runs.c.id == run.id)
            .values(tags={**run.tags, **tags}, row_version=runs.c.row_version + 1)
        )
        rows = [{"run_id": run.id, "key": key, "value": value} for key, value in tags.items()]
        connection.execute(sa.insert(run_tags), rows)
        ours = sa.and_(events.c.run_id == run.id, events.c.kind == "status")
        query = sa.select(events.c.seq, events.c.data).where(ours)
        for seq, data in connection.execute(query).all():
            code = (data.get("reason") or {}).get("code")
            if code in REASONS:
                reason = {**data["reason"], "code": REASONS[code]}
                connection.execute(
                    sa.update(events)
                    .where(ours, events.c.seq == seq)
                    .values(data={**data, "reason": reason})
                )
    for old, new in REASONS.items():
        for table in (runs, transitions):
            connection.execute(
                sa.update(table).where(table.c.reason_code == old).values(reason_code=new)
            )
    op.drop_table("sweep_runs")
    op.drop_table("sweeps")
    # runs.sweep_id stays until the next release: replicas of the one before still read it
