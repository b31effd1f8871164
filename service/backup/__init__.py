"""Backups: copy a service's database and storage to a directory, and restore them.

Imports every other room of the service; nothing imports it. ``python -m service.backup`` runs it.
"""
