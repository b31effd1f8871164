"""Append-only files: the event journal, logs of ranks, and TensorBoard's event files.

Imports `storage.files` and the run directory. The driver's journal writes them, the service reads
them.
"""
