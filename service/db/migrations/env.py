"""Alembic's entry point: migrate over the connection that Database.migrate passes in."""

from alembic import context

from service.db import alert_tables
from service.db.tables import metadata

assert alert_tables.alerts.metadata is metadata

connection = context.config.attributes["connection"]
context.configure(
    connection=connection, target_metadata=metadata, render_as_batch=True, compare_type=True
)
with context.begin_transaction():
    context.run_migrations()
