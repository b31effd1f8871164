"""Keep which run's steps a replay trains again, and its result"""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("replay_of", sa.JSON(none_as_null=True)))
    op.add_column("runs", sa.Column("replayed_run", sa.String(32)))
    op.create_index("ix_runs_replayed_run_created_at", "runs", ["replayed_run", "created_at"])


def downgrade() -> None:
    op.drop_index("ix_runs_replayed_run_created_at", "runs")
    op.drop_column("runs", "replayed_run")
    op.drop_column("runs", "replay_of")
