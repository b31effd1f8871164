"""Routes of runs: submit, list and control them, their history, logs and checkpoints.

Imports `service/api`, which has what all routes share, and the database. Pages and annexes import
it.
"""
