"""Bytes in a place: the protocol of four methods, a local disk and an object store.

Imports `storage.errors`. Every other room is built on it.
"""
