"""One rank's part in an attempt of a run, whoever's loop makes the steps. Read `session` first: it
says the protocol in its order.

`report` tells of the steps. Imports the state, snapshots and checkpoints. Everstep's own loop and
`protect` import it.
"""
