"""What is trained: the protocol of a task, the built-in tasks, and the metrics of a user's own.

Imports data and models. `checks` and the loop import it.
"""
