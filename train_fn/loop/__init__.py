"""The training loop of one rank: attempt, replica, restore, boundary between epochs, evaluation,
reports.

What happens at the end of an epoch is in `boundary`. Imports the step, the state, samples,
snapshots and checkpoints.
"""
