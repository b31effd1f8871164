"""The newest state in a node's shared memory: published, left by a rank that ends, elected by the
next attempt.

Imports the training state. The loop imports it.
"""
