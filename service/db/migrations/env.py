"""Alembic's entry point: migrate over the connection that Database.migrate passes in."""

from alembic import context

from service.db.tables import metadata

connection = context.config.attributes["connection"]
context.configure(
    connection=connection, target_metadata=metadata, render_as_batch=True, compare_type=True
)
with context.begin_transaction():
    context.run_migrations()
