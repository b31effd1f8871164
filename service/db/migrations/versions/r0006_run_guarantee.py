"""Keep what a run's user may rely on of its samples' use"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("guarantee", sa.Text()))


def downgrade() -> None:
    op.drop_column("runs", "guarantee")
