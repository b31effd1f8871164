"""One rank's part in an attempt of a run, whoever's loop makes the steps. Read `session` first: it
says the protocol in its order.

`restore` finds the state that an attempt begins from, and brings it to every rank; `report` tells
of the steps. Imports the state, snapshots and checkpoints. Everstep's own loop and `protect` import
it.
"""
