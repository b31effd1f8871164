"""Fold a run's events into what clients read: status, attempts, failures, goodput.

Pure functions over the history. Imports the model only. The database calls them in the transaction
that stores the events.
"""
