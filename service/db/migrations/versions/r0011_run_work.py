"""Keep a run's pace and the resources that it has held"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("work_ledger", sa.JSON(none_as_null=True)))


def downgrade() -> None:
    op.drop_column("runs", "work_ledger")
