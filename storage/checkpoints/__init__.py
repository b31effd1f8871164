"""Checkpoints: the commit protocol, manifests, lineage and retention, verified reads.

The one place where a checkpoint becomes durable. Imports `storage.files` and the run directory.
"""
