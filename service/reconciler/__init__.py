"""The control loop: `observe` gathers facts, `decide` turns them into decisions, `execute` acts.

Imports the database, the cluster and the control files. `service.process` runs it.
"""
