"""Recovery decisions, as pure functions: which rank failed first, whether it is dead or hangs, and
whether, when and at which size the run restarts.

`evidence` holds what is known of each rank, and classifies an exception. `verdict` names the first
rank that failed; `hang` finds one that stands still. `decision` says what follows, with a rule for
each way to end a run; `sizing` says at which size, `links` which nodes do not hear each other.
Imports nothing of the loop.
"""
