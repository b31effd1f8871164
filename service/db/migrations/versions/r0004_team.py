"""Projects with quotas, an audit log, leases, when tokens were used, and what a run was preempted
by"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "projects",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("max_workers", sa.Integer()),
        sa.Column("max_running", sa.Integer()),
        sa.Column("max_queued", sa.Integer()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_projects")),
    )
    op.execute(
        "INSERT INTO projects (name, created_at) "
        "SELECT name, max(at) FROM (SELECT project AS name, min(created_at) AS at FROM runs GROUP "
        "BY project "
        "UNION ALL SELECT project, min(created_at) FROM tokens WHERE project IS NOT NULL GROUP BY "
        "project "
        "UNION ALL SELECT 'default', 0.0) AS known GROUP BY name"
    )
    op.create_table(
        "audit_log",
        sa.Column("seq", sa.Integer(), nullable=False, autoincrement=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("token_id", sa.String(length=32)),
        sa.Column("token_name", sa.String(length=128)),
        sa.Column("role", sa.String(length=16)),
        sa.Column("address", sa.String(length=64)),
        sa.Column("method", sa.String(length=8), nullable=False),
        sa.Column("path", sa.String(length=512), nullable=False),
        sa.Column("target", sa.String(length=64)),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_audit_log")),
    )
    op.create_index(op.f("ix_audit_log_token_id_seq"), "audit_log", ["token_id", "seq"])
    op.create_table(
        "leases",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("holder", sa.String(length=128), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_leases")),
    )
    op.add_column("tokens", sa.Column("last_used_at", sa.Double()))
    op.add_column("runs", sa.Column("preempted_by", sa.String(length=32)))
    op.add_column("runs", sa.Column("workers_limit", sa.Integer()))


def downgrade() -> None:
    op.drop_column("runs", "workers_limit")
    op.drop_column("runs", "preempted_by")
    op.drop_column("tokens", "last_used_at")
    for table in ("leases", "audit_log", "projects"):
        op.drop_table(table)
