"""One step: what ranks say of it (`report`), peers and their collectives, buffers, precision,
timing.

Imports the samples only. The loop imports it.
"""
