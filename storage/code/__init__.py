"""Archives of users' code, named by their digest: reading within limits, and keeping.

Imports the file system only.
"""
