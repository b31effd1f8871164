"""The `everstep` command. One file per group of commands, plus the demo.

Imports the client, the spec and the other rooms of `everstep`; nothing imports it.
"""
