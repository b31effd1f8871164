"""Decisions of recovery, pure: who failed first, whether a rank is dead or hangs, what is tried
again, at which size.

Where it is decided that a rank is dead: `verdict`. Imports nothing of the loop.
"""
