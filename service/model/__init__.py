"""The facts of a run as frozen rows, and the table of status transitions. Pure.

Imports nothing of the service. Every room imports it.
"""
