"""The service process: arguments, home directory, backends, app, server and logs.

Imports every room; nothing imports it.
"""
