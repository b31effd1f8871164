"""Keep the hash chain over the steps of a run"""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("chain", sa.String(64)))


def downgrade() -> None:
    op.drop_column("runs", "chain")
