"""The training state: everything that a run needs to go on as if nothing had happened.

Imports optimizers and averages. Checkpoints, snapshots and the loop import it.
"""
