"""User code on the client: which files belong to an archive, and packing them.

Imports `everstep.errors` only. The client, the CLI and the service import it.
"""
