"""Keep people who log in at an identity provider, and where each session comes from"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "users",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("issuer", sa.String(length=512), nullable=False),
        sa.Column("subject", sa.String(length=255), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("issuer", "subject", name=op.f("uq_users_issuer_subject")),
    )
    op.add_column("tokens", sa.Column("user_id", sa.String(length=32)))
    op.add_column("tokens", sa.Column("owner", sa.String(length=128)))
    op.add_column("tokens", sa.Column("kind", sa.String(length=16)))
    op.create_index(op.f("ix_tokens_user_id"), "tokens", ["user_id"])
    op.add_column("sessions", sa.Column("address", sa.String(length=64)))
    op.add_column("sessions", sa.Column("browser", sa.String(length=256)))


def downgrade() -> None:
    op.drop_column("sessions", "browser")
    op.drop_column("sessions", "address")
    op.drop_index(op.f("ix_tokens_user_id"), "tokens")
    op.drop_column("tokens", "kind")
    op.drop_column("tokens", "owner")
    op.drop_column("tokens", "user_id")
    op.drop_table("users")
