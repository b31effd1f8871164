"""Create the first tables"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "idempotency_keys",
        sa.Column("scope", sa.String(length=32), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("body_sha256", sa.String(length=64), nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("scope", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_index(op.f("ix_idempotency_keys_created_at"), "idempotency_keys", ["created_at"])
    op.create_table(
        "runs",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("project", sa.String(length=64), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("created_by", sa.String(length=32), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("reason_code", sa.String(length=64)),
        sa.Column("reason_message", sa.Text()),
        sa.Column("stop_requested", sa.String(length=8)),
        sa.Column("stop_requested_at", sa.Double()),
        sa.Column("submission", sa.Integer(), nullable=False),
        sa.Column("ray_job_id", sa.String(length=128)),
        sa.Column("submitted_at", sa.Double()),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("total_steps", sa.Integer()),
        sa.Column("steps_per_epoch", sa.Integer()),
        sa.Column("world_size", sa.Integer()),
        sa.Column("workers", sa.JSON(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("best", sa.JSON(none_as_null=True)),
        sa.Column("latest_checkpoint", sa.JSON(none_as_null=True)),
        sa.Column("recent_checkpoints", sa.JSON(), nullable=False),
        sa.Column("restarts", sa.Integer(), nullable=False),
        sa.Column("steps_lost", sa.Integer(), nullable=False),
        sa.Column("steps_lost_at_restore", sa.Integer(), nullable=False),
        sa.Column("time_ledger", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double()),
        sa.Column("finished_at", sa.Double()),
        sa.Column("journal_submission", sa.Integer(), nullable=False),
        sa.Column("journal_cursor", sa.Text()),
        sa.Column("journal_n", sa.Integer(), nullable=False),
        sa.Column("last_seq", sa.Integer(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("row_version", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
    )
    op.create_index(op.f("ix_runs_created_at_id"), "runs", ["created_at", "id"])
    op.create_index(op.f("ix_runs_name_created_at_id"), "runs", ["name", "created_at", "id"])
    op.create_index(op.f("ix_runs_project_created_at_id"), "runs", ["project", "created_at", "id"])
    op.create_index(op.f("ix_runs_status_created_at_id"), "runs", ["status", "created_at", "id"])
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("project", sa.String(length=64)),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double()),
        sa.Column("revoked_at", sa.Double()),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
        sa.UniqueConstraint("sha256", name=op.f("uq_tokens_sha256")),
    )
    op.create_table(
        "checkpoint_checks",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("verified_at", sa.Double(), nullable=False),
        sa.Column("problem", sa.Text()),
        sa.ForeignKeyConstraint(
            ["run_id"],
            ["runs.id"],
            name=op.f("fk_checkpoint_checks_run_id_runs"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("run_id", "name", name=op.f("pk_checkpoint_checks")),
    )
    op.create_table(
        "events",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("submission", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name=op.f("fk_events_run_id_runs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "seq", name=op.f("pk_events")),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_events_run_id_kind_seq"), "events", ["run_id", "kind", "seq"])
    op.create_table(
        "metrics",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("value", sa.Double()),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name=op.f("fk_metrics_run_id_runs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "name", "step", name=op.f("pk_metrics")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "run_tags",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("value", sa.String(length=256), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name=op.f("fk_run_tags_run_id_runs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "key", name=op.f("pk_run_tags")),
    )
    op.create_index(op.f("ix_run_tags_key_value"), "run_tags", ["key", "value"])
    op.create_table(
        "transitions",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("from_status", sa.String(length=16)),
        sa.Column("to_status", sa.String(length=16), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("reason_code", sa.String(length=64)),
        sa.Column("reason_message", sa.Text()),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name=op.f("fk_transitions_run_id_runs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "seq", name=op.f("pk_transitions")),
    )


def downgrade() -> None:
    for table in (
        "transitions",
        "run_tags",
        "metrics",
        "events",
        "checkpoint_checks",
        "tokens",
        "runs",
        "idempotency_keys",
    ):
        op.drop_table(table)
