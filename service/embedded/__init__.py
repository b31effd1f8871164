"""A Ray cluster of this machine's own, for a laptop or a single server.

Imports settings and the note of the cluster. `service.process` starts it; two of its modules are
processes of their own, and import Ray.
"""
