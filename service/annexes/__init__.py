"""The features beside the core, each in a folder with its routes, tables, rules and pages.

An annex imports the core, and no other annex. `registry.py` lists all; only that is imported from
outside.
"""
