"""Files that concern the whole cluster, not one run: marks of nodes and reports of checks.

Imports the file system only.
"""
