"""The training loop of one rank. Read `attempt` first: it is the loop on one screen.

`training` prepares (`parts`, `replica`, `first_pass`, `restore`), `step` and
`commit` make a step, `boundary` closes an epoch, `final_checkpoint` ends a run, `departure`
leaves a broken attempt, `hand_over` one that makes room for another group, `survivor` says what
stays in the process then, `rescue` keeps the state of a rank that hangs. Imports the step, the
state, samples, snapshots and checkpoints.
"""
