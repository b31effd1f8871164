"""Saving: when, what is copied, the thread that writes, the files' formats, and reading them back.
`sharded` makes one checkpoint of the pieces that ranks write.

Imports the training state and the storage. The loop asks it to save states.
"""
