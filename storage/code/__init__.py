"""Archives of user code, named by their digest: read within limits, and stored.

Imports the file system only.
"""
