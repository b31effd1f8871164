"""One step: totals that travel with the gradients, plans, peers and their collectives, buffers,
precision, timing.

Imports the samples only. The loop imports it.
"""
