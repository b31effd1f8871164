"""Checkpoints: the commit protocol, manifests, lineage, retention and verified reads.

The one place where a checkpoint becomes durable. Imports `storage.files`, the run directory, claims
and the journal.
"""
