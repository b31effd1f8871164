"""Which samples belong to which step and rank, loading them, and the ledger that proves it.

Imports nothing of the loop.
"""
