"""Append-only files: the event journal, ranks' logs, and event files.

Imports `storage.files`. The driver's journal writes them, the service reads them.
"""
