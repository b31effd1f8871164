"""SQL: engine, migrations, queries and guarded updates. Rows leave it frozen (`service.model`).

Imports the model and the projections. Everything that needs a row imports it.
"""
