"""The training loop of one rank. Read `attempt` first: it is the loop on one screen.

`training` prepares (`build`, `replica`, `first_pass`), `step` and `commit` make a step, `evaluate`
an evaluation, `departure` says what is left of a broken attempt, `rescue` keeps the state of a rank
that hangs. Lives by `session`. Imports the step,
the state, samples, snapshots and checkpoints.
"""
