"""Whether the storage is the one that the database belongs to, and adopting another one.

Imports the database and the model. The API, the reconciler and the start of the service ask it.
"""
