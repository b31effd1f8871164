"""Backups: one directory that holds a service's database and storage, and how it is restored.

Imports every other room of the service; nothing imports it. ``python -m service.backup`` runs it.
"""
