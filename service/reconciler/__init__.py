"""The control loop: `observe` gathers facts, `decide` turns them into decisions, `execute` acts.

Imports the database and the cluster. `service.process` runs it.
"""
