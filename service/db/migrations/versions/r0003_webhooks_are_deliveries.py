"""Let the deliveries of alerts hold webhooks too"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # No row moves here: replicas of 0.1.0 go on to write notifications. The sender adopts them.
    with op.batch_alter_table("alert_deliveries") as deliveries:
        deliveries.alter_column("alert_id", existing_type=sa.String(length=32), nullable=True)
        deliveries.add_column(sa.Column("url", sa.Text()))
