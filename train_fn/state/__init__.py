"""The training state: everything that a run needs to resume exactly where it stopped.
`run_state` is the whole of it, `pieces` who holds what of a model that is sharded.

Imports samples, step and tasks. Checkpoints, snapshots and the loop import it.
"""
