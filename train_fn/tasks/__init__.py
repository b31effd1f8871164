"""What is trained: the protocol of a task, the built-in tasks, and checks of a user's own.

Imports data and models. The loop imports it.
"""
