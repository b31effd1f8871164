"""Users' code and packages on a node: unpacking, installing, importing, and naming lines in errors.

Tasks and ranks import it.
"""
