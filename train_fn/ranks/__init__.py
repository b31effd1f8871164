"""How a rank's process begins, and what it does around the loop. Imports no Ray.

The hosts of ranks (``train_fn/ray_train/worker_actor.py``) use ``fork``; ``zygote`` says what is
forked from what.
"""
