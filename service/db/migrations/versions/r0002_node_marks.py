"""Remember which nodes take no ranks, and find failures by their time"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
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
    failures_only = sa.text("kind = 'failure'")
    op.create_index(
        "ix_events_failures_at",
        "events",
        ["at"],
        sqlite_where=failures_only,
        postgresql_where=failures_only,
    )


def downgrade() -> None:
    op.drop_index("ix_events_failures_at", "events")
    op.drop_table("node_marks")
