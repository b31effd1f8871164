"""The control loop: facts are observed, `decide` turns them into decisions, `execute` carries them
out.

Imports the database, the cluster and the control files. `service.process` runs it.
"""
