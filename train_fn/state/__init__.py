"""The training state: everything that a run needs to resume exactly where it stopped.

Imports samples, step and tasks. Checkpoints, snapshots and the loop import it.
"""
