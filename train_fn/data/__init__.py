"""The built-in data sets.

Imports the samples' random streams. Tasks import it.
"""
