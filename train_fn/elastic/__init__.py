"""Sums over the micro-batches of a step that are the same bits at every world size: the tree of
additions, and the exchange of its nodes between ranks, for ``train.exactness: elastic``.

Imports the step. The loop and the tasks' metrics import it.
"""
