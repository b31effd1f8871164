"""Remember which storage the database belongs to"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "storage_identity",
        sa.Column("name", sa.String(length=16), nullable=False),
        sa.Column("storage_id", sa.String(length=36), nullable=False),
        sa.Column("recorded_at", sa.Double(), nullable=False),
        sa.Column("seen_at", sa.Double()),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_storage_identity")),
    )


def downgrade() -> None:
    op.drop_table("storage_identity")
