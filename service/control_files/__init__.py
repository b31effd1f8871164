"""Copies of database rows in the storage, which drivers read: marks of nodes, and checkpoints to
keep.

Imports the database. The API and the reconciler import it.
"""
