"""What events add up to: attempts, failures, goodput, drills. Pure functions over the history.

Imports the model only. The database applies them in the transaction that stores the events.
"""
