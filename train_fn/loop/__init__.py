"""The training loop of one rank. Read `attempt` first: it is the loop on one screen.

`training` prepares (`build`, `passes`, `replica`, `first_pass`), `step` and `commit` make a step,
`epoch_end` does what is due where an epoch ends (`evaluate`), `leave` leaves a broken attempt.
Lives by `session`. Imports the step, the state, samples, snapshots and checkpoints.
"""
