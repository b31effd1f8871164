"""Which project uploaded which code"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "code_archives",
        sa.Column("project", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=80), nullable=False),
        sa.Column("size_bytes", sa.Integer(), nullable=False),
        sa.Column("created_by", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("project", "digest", name=op.f("pk_code_archives")),
    )
    # What runs of a project have used stays usable there. Its size is not known here, and counts as
    # nothing.
    runs = sa.table(
        "runs",
        sa.column("project", sa.String()),
        sa.column("spec", sa.JSON()),
        sa.column("created_by", sa.String()),
        sa.column("created_at", sa.Double()),
    )
    made = sa.table(
        "code_archives",
        *map(sa.column, ("project", "digest", "size_bytes", "created_by", "created_at")),
    )
    digest = runs.c.spec[("code", "archive")].as_string()
    firsts = sa.select(
        runs.c.project,
        digest,
        sa.literal(0),
        sa.func.min(runs.c.created_by),
        sa.func.min(runs.c.created_at),
    )
    used = firsts.where(digest.is_not(None)).group_by(runs.c.project, digest)
    op.execute(
        made.insert().from_select(
            ["project", "digest", "size_bytes", "created_by", "created_at"], used
        )
    )


def downgrade() -> None:
    op.drop_table("code_archives")
