"""The training loop of one rank. Read `attempt` first: it is the loop on one screen.

`training` prepares, `beginning` begins, `gradients` and `commit` make a step, `boundary` closes an
epoch, `final_checkpoint` ends a run, `departure` leaves a broken attempt. Imports the step, the
state, samples, snapshots and checkpoints.
"""
