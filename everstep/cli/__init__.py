"""The `everstep` command: one file per group of commands, and the demo.

Imports the client, the spec and the other rooms of `everstep`; nothing imports it.
"""
