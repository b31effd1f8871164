"""Sweeps and their runs"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sweeps",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("project", sa.String(length=64), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("reason_code", sa.String(length=64)),
        sa.Column("reason_message", sa.Text()),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("created_by", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double()),
        sa.Column("idempotency_key", sa.String(length=255)),
        sa.Column("body_sha256", sa.String(length=64)),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sweeps")),
        sa.UniqueConstraint(
            "created_by", "idempotency_key", name=op.f("uq_sweeps_created_by_idempotency_key")
        ),
    )
    op.create_index(op.f("ix_sweeps_created_at_id"), "sweeps", ["created_at", "id"])
    op.create_index(
        op.f("ix_sweeps_project_created_at_id"), "sweeps", ["project", "created_at", "id"]
    )
    op.create_index(op.f("ix_sweeps_status"), "sweeps", ["status"])
    op.create_table(
        "sweep_runs",
        sa.Column("sweep_id", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("params", sa.JSON(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("run_id", sa.String(length=32)),
        sa.Column("rung", sa.Integer(), nullable=False),
        sa.Column("results", sa.JSON(), nullable=False),
        sa.Column("best_value", sa.Double()),
        sa.Column("best_step", sa.Integer()),
        sa.Column("seen_step", sa.Integer()),
        sa.ForeignKeyConstraint(
            ["sweep_id"],
            ["sweeps.id"],
            name=op.f("fk_sweep_runs_sweep_id_sweeps"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("sweep_id", "number", name=op.f("pk_sweep_runs")),
    )
    op.add_column("runs", sa.Column("sweep_id", sa.String(length=32)))


def downgrade() -> None:
    op.drop_column("runs", "sweep_id")
    op.drop_table("sweep_runs")
    op.drop_table("sweeps")
