"""The service's processes: the command line, the home directory, the app, the server and its logs.

Imports every room; nothing imports it.
"""
