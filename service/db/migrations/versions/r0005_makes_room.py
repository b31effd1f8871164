"""What a run makes room for by shrinking, and what is to be told to webhooks"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("shrunk", sa.JSON(none_as_null=True)))

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


def downgrade() -> None:
    op.drop_table("notifications")
    op.drop_column("runs", "shrunk")
