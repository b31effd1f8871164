"""The embedded Ray cluster: a cluster on this machine, for a laptop or a single server.

Imports settings and the note of the cluster. `service.process` starts it. The keeper and the fork
server are processes of their own, and only they import Ray.
"""
