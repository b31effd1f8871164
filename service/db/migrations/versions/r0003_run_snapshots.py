"""Keep how a run's nodes hold its state"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("snapshots", sa.String(length=16)))


def downgrade() -> None:
    op.drop_column("runs", "snapshots")
