"""Let lists of runs walk an index from their first run to their last"""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index(
        op.f("ix_runs_project_status_created_at_id"),
        "runs",
        ["project", "status", "created_at", "id"],
    )
    op.create_index(op.f("ix_run_tags_key_value_run_id"), "run_tags", ["key", "value", "run_id"])
    op.drop_index(op.f("ix_run_tags_key_value"), "run_tags")


def downgrade() -> None:
    op.create_index(op.f("ix_run_tags_key_value"), "run_tags", ["key", "value"])
    op.drop_index(op.f("ix_run_tags_key_value_run_id"), "run_tags")
    op.drop_index(op.f("ix_runs_project_status_created_at_id"), "runs")
