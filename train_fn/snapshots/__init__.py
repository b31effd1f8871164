"""The newest state in a node's shared memory: published, left by a rank that ends, elected by the
next attempt. Read `keeper` first; `whole` and `pieces` are the two that keep states.

Imports the training state. The loop imports it.
"""
