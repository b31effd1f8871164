"""Keep who submitted a run, and what its users wrote about it"""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("owner", sa.String(128)))
    op.add_column("runs", sa.Column("notes", sa.Text()))
    op.execute(
        "UPDATE runs SET owner = (SELECT COALESCE(tokens.owner, tokens.name) "
        "FROM tokens WHERE tokens.id = runs.created_by)"
    )


def downgrade() -> None:
    op.drop_column("runs", "notes")
    op.drop_column("runs", "owner")
