"""Alerts of projects, their open incidents, and their messages"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "alerts",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("project", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("when", sa.String(length=16), nullable=False),
        sa.Column("more_than", sa.Integer()),
        sa.Column("stalled_s", sa.Double()),
        sa.Column("format", sa.String(length=16), nullable=False),
        sa.Column("target", sa.JSON(), nullable=False),
        sa.Column("created_by", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alerts")),
    )
    op.create_index(op.f("ix_alerts_project"), "alerts", ["project"])
    op.create_table(
        "alert_incidents",
        sa.Column("alert_id", sa.String(length=32), nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("subject", sa.String(length=32), nullable=False),
        sa.Column("opened_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["alert_id"],
            ["alerts.id"],
            name=op.f("fk_alert_incidents_alert_id_alerts"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["run_id"],
            ["runs.id"],
            name=op.f("fk_alert_incidents_run_id_runs"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("alert_id", "run_id", "subject", name=op.f("pk_alert_incidents")),
    )
    op.create_index(op.f("ix_alert_incidents_run_id"), "alert_incidents", ["run_id"])
    op.create_table(
        "alert_deliveries",
        sa.Column("seq", sa.Integer(), nullable=False, autoincrement=True),
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("alert_id", sa.String(length=32), nullable=False),
        sa.Column("run_id", sa.String(length=32)),
        sa.Column("incident", sa.String(length=128), nullable=False),
        sa.Column("event", sa.String(length=16), nullable=False),
        sa.Column("message", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("num_tries", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("next_at", sa.Double(), nullable=False),
        sa.Column("give_up_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double()),
        sa.Column("status", sa.Integer()),
        sa.Column("answer", sa.Text()),
        sa.Column("error", sa.Text()),
        sa.ForeignKeyConstraint(
            ["alert_id"],
            ["alerts.id"],
            name=op.f("fk_alert_deliveries_alert_id_alerts"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_alert_deliveries")),
        sa.UniqueConstraint("id", name=op.f("uq_alert_deliveries_id")),
    )
    op.create_index(
        op.f("ix_alert_deliveries_alert_id_seq"), "alert_deliveries", ["alert_id", "seq"]
    )
    op.create_index(
        op.f("ix_alert_deliveries_state_next_at"), "alert_deliveries", ["state", "next_at"]
    )


def downgrade() -> None:
    op.drop_table("alert_deliveries")
    op.drop_table("alert_incidents")
    op.drop_table("alerts")
