"""Index the runs that have not ended"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    unended = sa.text("finished_at IS NULL")
    op.create_index(
        "ix_runs_unended",
        "runs",
        ["created_at", "id"],
        sqlite_where=unended,
        postgresql_where=unended,
    )
