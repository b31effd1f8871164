"""The database: engine, migrations, queries and guarded updates in SQL. Rows that leave it are
frozen (`service.model`).

Imports the model and the projections. Everything that needs a row imports it.
"""
