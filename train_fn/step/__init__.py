"""One step: totals in the gradients' all-reduce, plans, peers and their collectives, buffers,
precision, timing.

Imports the samples only. The loop imports it.
"""
