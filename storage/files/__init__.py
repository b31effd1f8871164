"""File access: the `Files` protocol, a local directory and an object store.

Imports `storage.errors`. Every other room is built on it.
"""
