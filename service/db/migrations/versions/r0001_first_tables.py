"""Create the tables of version 0.1.0"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
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
        "audit_log",
        sa.Column("seq", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("token_id", sa.String(length=32)),
        sa.Column("token_name", sa.String(length=128)),
        sa.Column("role", sa.String(length=16)),
        sa.Column("address", sa.String(length=64)),
        sa.Column("method", sa.String(length=8), nullable=False),
        sa.Column("path", sa.String(length=512), nullable=False),
        sa.Column("target", sa.String(length=64)),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_audit_log")),
    )
    op.create_index(op.f("ix_audit_log_token_id_seq"), "audit_log", ["token_id", "seq"])
    op.create_table(
        "code_archives",
        sa.Column("project", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=80), nullable=False),
        sa.Column("size_bytes", sa.Integer(), nullable=False),
        sa.Column("created_by", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("project", "digest", name=op.f("pk_code_archives")),
    )
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
        "leases",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("holder", sa.String(length=128), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_leases")),
    )
    op.create_table(
        "node_marks",
        sa.Column("node_id", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("by", sa.String(length=128), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("deadline", sa.Double()),
        sa.Column("gone_since", sa.Double()),
        sa.PrimaryKeyConstraint("node_id", name=op.f("pk_node_marks")),
    )
    op.create_table(
        "notifications",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("url", sa.String(length=2048), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("next_at", sa.Double(), nullable=False),
        sa.Column("num_tries", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "seq", name=op.f("pk_notifications")),
    )
    op.create_index(op.f("ix_notifications_next_at"), "notifications", ["next_at"])
    op.create_table(
        "projects",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("max_workers", sa.Integer()),
        sa.Column("max_running", sa.Integer()),
        sa.Column("max_queued", sa.Integer()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_projects")),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("project", sa.String(length=64), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("time_ledger", sa.JSON(), nullable=False),
        sa.Column("work_ledger", sa.JSON(none_as_null=True)),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("reason_code", sa.String(length=64)),
        sa.Column("reason_message", sa.Text()),
        sa.Column("submission", sa.Integer(), nullable=False),
        sa.Column("ray_job_id", sa.String(length=128)),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("total_steps", sa.Integer()),
        sa.Column("world_size", sa.Integer()),
        sa.Column("workers", sa.JSON(), nullable=False),
        sa.Column("snapshots", sa.String(length=16)),
        sa.Column("guarantee", sa.Text()),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("best", sa.JSON(none_as_null=True)),
        sa.Column("latest_checkpoint", sa.JSON(none_as_null=True)),
        sa.Column("restarts", sa.Integer(), nullable=False),
        sa.Column("steps_lost", sa.Integer(), nullable=False),
        sa.Column("redone_s", sa.Double()),
        sa.Column("replay_of", sa.JSON(none_as_null=True)),
        sa.Column("chain", sa.String(length=64)),
        sa.Column("started_at", sa.Double()),
        sa.Column("finished_at", sa.Double()),
        sa.Column("sweep_id", sa.String(length=32)),
        sa.Column("owner", sa.String(length=128)),
        sa.Column("notes", sa.Text()),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("created_by", sa.String(length=32), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("replayed_run", sa.String(length=32)),
        sa.Column("stop_requested", sa.String(length=8)),
        sa.Column("stop_requested_at", sa.Double()),
        sa.Column("preempted_by", sa.String(length=32)),
        sa.Column("workers_limit", sa.Integer()),
        sa.Column("shrunk", sa.JSON(none_as_null=True)),
        sa.Column("submitted_at", sa.Double()),
        sa.Column("steps_per_epoch", sa.Integer()),
        sa.Column("recent_checkpoints", sa.JSON(), nullable=False),
        sa.Column("steps_lost_at_restore", sa.Integer(), nullable=False),
        sa.Column("journal_submission", sa.Integer(), nullable=False),
        sa.Column("journal_cursor", sa.Text()),
        sa.Column("journal_n", sa.Integer(), nullable=False),
        sa.Column("last_seq", sa.Integer(), nullable=False),
        sa.Column("row_version", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
    )
    op.create_index(op.f("ix_runs_created_at_id"), "runs", ["created_at", "id"])
    op.create_index(op.f("ix_runs_name_created_at_id"), "runs", ["name", "created_at", "id"])
    op.create_index(op.f("ix_runs_project_created_at_id"), "runs", ["project", "created_at", "id"])
    op.create_index(
        op.f("ix_runs_project_status_created_at_id"),
        "runs",
        ["project", "status", "created_at", "id"],
    )
    op.create_index(op.f("ix_runs_replayed_run_created_at"), "runs", ["replayed_run", "created_at"])
    op.create_index(op.f("ix_runs_status_created_at_id"), "runs", ["status", "created_at", "id"])
    op.create_table(
        "storage_identity",
        sa.Column("name", sa.String(length=16), nullable=False),
        sa.Column("storage_id", sa.String(length=36), nullable=False),
        sa.Column("recorded_at", sa.Double(), nullable=False),
        sa.Column("seen_at", sa.Double()),
        sa.Column("database_id", sa.String(length=36)),
        sa.Column("generation", sa.Integer(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_storage_identity")),
    )
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
        "tokens",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("project", sa.String(length=64)),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double()),
        sa.Column("revoked_at", sa.Double()),
        sa.Column("last_used_at", sa.Double()),
        sa.Column("user_id", sa.String(length=32)),
        sa.Column("owner", sa.String(length=128)),
        sa.Column("kind", sa.String(length=16)),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
        sa.UniqueConstraint("sha256", name=op.f("uq_tokens_sha256")),
    )
    op.create_index(op.f("ix_tokens_user_id"), "tokens", ["user_id"])
    op.create_table(
        "users",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("issuer", sa.String(length=512), nullable=False),
        sa.Column("subject", sa.String(length=255), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("issuer", "subject", name=op.f("uq_users_issuer_subject")),
    )
    op.create_table(
        "alert_deliveries",
        sa.Column("seq", sa.Integer(), autoincrement=True, nullable=False),
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
            ["run_id"], ["runs.id"], name=op.f("fk_alert_incidents_run_id_runs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("alert_id", "run_id", "subject", name=op.f("pk_alert_incidents")),
    )
    op.create_index(op.f("ix_alert_incidents_run_id"), "alert_incidents", ["run_id"])
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
    op.create_index(
        "ix_events_failures_at",
        "events",
        ["at"],
        sqlite_where=sa.text("kind = 'failure'"),
        postgresql_where=sa.text("kind = 'failure'"),
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
    op.create_index(op.f("ix_run_tags_key_value_run_id"), "run_tags", ["key", "value", "run_id"])
    op.create_table(
        "sessions",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("token_id", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("address", sa.String(length=64)),
        sa.Column("browser", sa.String(length=256)),
        sa.ForeignKeyConstraint(
            ["token_id"],
            ["tokens.id"],
            name=op.f("fk_sessions_token_id_tokens"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_sessions")),
    )
    op.create_index(op.f("ix_sessions_expires_at"), "sessions", ["expires_at"])
    op.create_index(op.f("ix_sessions_token_id_created_at"), "sessions", ["token_id", "created_at"])
    op.create_table(
        "sweep_runs",
        sa.Column("sweep_id", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
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
    op.execute("INSERT INTO projects (name, created_at) VALUES ('default', 0.0)")
