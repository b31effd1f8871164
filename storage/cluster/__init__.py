"""Files about the whole cluster, not one run: node marks, deployment checks and the storage's
identity.

Imports every other room of `storage`; nothing here imports it.
"""
