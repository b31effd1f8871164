"""Recovery decisions, as pure functions: which rank failed first, whether it is dead or hangs, and
whether, when and at which size the run restarts.

``error_kinds`` classifies an exception, ``verdict`` names the first failing rank, ``decision`` says
what follows: ``unrecoverable`` has the rules that end a run, ``past_failures`` counts what came
before. ``failure_event`` reports it. Imports nothing of the loop.
"""
