"""Keep the work that a user's function has done again between its reports"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("redone_s", sa.Double()))


def downgrade() -> None:
    op.drop_column("runs", "redone_s")
